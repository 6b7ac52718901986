"""Implementations of the cells' operations: those of step-by-step cells and those of linear recurrences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from econmt_ops.backends.triton import with_kernels
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
    bound = cells[-1]
    if isinstance(bound, ScanLayer):
        return {
            "reference": (functools.partial(scanned.reference, bound), scanned.REFERENCE),
            "recompute": (functools.partial(scanned.recompute, bound), scanned.RECOMPUTE),
            "triton": (functools.partial(fused.fused, bound), fused.TRITON),
        }
    cell = cast(StepCell, cells[0])
    recompute: Callable[..., Any] = functools.partial(stepped.recompute, cell)
    return {
        "reference": (
            _REFERENCES.get(cell.name, functools.partial(stepped.reference, cell)),
            stepped.REFERENCE,
        ),
        "recompute": (recompute, stepped.RECOMPUTE),
        "compiled": compiled(recompute, stepped.RECOMPUTE),
        "triton": (functools.partial(recompute, backend="triton"), with_kernels(stepped.RECOMPUTE)),
    }
