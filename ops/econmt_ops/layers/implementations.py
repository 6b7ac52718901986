"""Implementations of the cells' operations: those of step-by-step cells and those of linear recurrences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from econmt_ops.backends.triton import STEP_CELLS, with_kernels
from econmt_ops.cells.protocol import Cell, StepCell
from econmt_ops.cells.scan import ScanLayer
from econmt_ops.dispatch.traits import Traits, compiled
from econmt_ops.layers import fused, gru_reference, scanned, stepped

_REFERENCES = {"gru": gru_reference.gru}
"""Reference implementations that are faster than a loop of steps."""


def implementations_for(cells: tuple[Cell, ...]) -> dict[str, tuple[Callable[..., Any], Traits]]:
    """Returns the implementations of a cell's operation with their traits, by name.

    Args:
        cells: Cells whose weights the operation takes. Linear recurrences run as the last of them (the widest window),
            which serves the others; step-by-step cells as the first, which knows the kind of weights.
    """
    last = cells[-1]
    if isinstance(last, ScanLayer):
        return {
            "reference": (functools.partial(scanned.reference, last), scanned.REFERENCE),
            "recompute": (functools.partial(scanned.recompute, last), scanned.RECOMPUTE),
            "triton": (functools.partial(fused.fused, last), fused.TRITON),
        }
    cell = cast(StepCell, cells[0])
    recompute: Callable[..., Any] = functools.partial(stepped.recompute, cell)
    reference = _REFERENCES.get(cell.name, functools.partial(stepped.reference, cell))
    functions = {
        "reference": (reference, stepped.REFERENCE),
        "recompute": (recompute, stepped.RECOMPUTE),
        "compiled": compiled(recompute, stepped.RECOMPUTE),
    }
    if cell.name in STEP_CELLS:
        kernels = functools.partial(recompute, backend="triton")
        functions["triton"] = kernels, with_kernels(stepped.RECOMPUTE)
    return functions
