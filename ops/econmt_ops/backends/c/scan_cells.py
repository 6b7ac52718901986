"""Layers of a linear recurrence without their products, in the C library: one pass per direction, see `scan_cells.h`.

Sizes: B batch, T steps, H hidden, K parts of the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends.c import call
from econmt_ops.cells.scan import ScanInputs

_RECURRENCES, _OUTPUTS = ("coupled", "gated", "shared"), ("plain", "relu", "gate", "highway")
"""Names in the order of their numbers in kernels.h."""

_LINE, _WIDEST = 16, 256
"""Columns of a task: a multiple of the first, a cache line of float32, and at most the second."""


def _fields(inputs: ScanInputs) -> dict[str, Any]:
    """Returns the fields that the structures of both passes have."""
    cell, hidden = inputs.cell, inputs.first.shape[1]
    rows, steps, columns = inputs.products.shape
    groups = max(1, -(-4 * torch.get_num_threads() // max(1, rows)))
    return {
        "parts": columns // hidden,
        "gates": cell.gates - 1,
        "recurrence": _RECURRENCES.index(cell.recurrence.name),
        "output": _OUTPUTS.index(cell.output.name),
        "squashes": cell.squashes,
        "rows": rows,
        "positions": steps,
        "hidden": hidden,
        "width": min(_WIDEST, max(_LINE, -(-hidden // (groups * _LINE)) * _LINE)),
        "products": inputs.products,
        "read": inputs.read,
        "initial": inputs.first,
        "lengths": inputs.lengths,
    }


def forward(inputs: ScanInputs, outputs: Tensor, cells: Tensor | None) -> Tensor:
    """Writes the results of a recurrence; returns c (B, H) after each row's last step.

    Args:
        inputs: arguments; the products include the bias.
        outputs: (B, T, H) is written, in the type of the products, and cells (B, T, H) float32, c after each step,
            unless None. Both may be slices of steps.
    """
    last = torch.empty_like(inputs.first, memory_format=torch.contiguous_format)
    call(
        "scan_cell_forward",
        inputs.products.numel(),
        **_fields(inputs),
        outputs=outputs,
        cells=cells,
        last=last,
    )
    return last


def backward(
    inputs: ScanInputs, cells: Tensor, doutputs: Tensor | None, dlast: Tensor, dproducts: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Writes the gradient of the products; returns the gradients of ``first`` and, if a highway reads it, of the input.

    Args:
        inputs, cells: as given to and written by :func:`forward`; ``inputs.first`` may have any stride.
        doutputs: (B, T, H), or None. dlast: (B, H) float32.
        dproducts: (B, T, K H), contiguous, is written; may be the products themselves.
    """
    cell, read, hidden = inputs.cell, inputs.read, inputs.first.shape[1]
    dfirst = dlast.clone(memory_format=torch.contiguous_format)
    dread = None
    if cell.output.name == "highway" and inputs.products.shape[2] == cell.gates * hidden:
        dread = torch.empty(read.shape, dtype=read.dtype)
    call(
        "scan_cell_backward",
        2 * inputs.products.numel(),
        **_fields(inputs),
        cells=cells,
        doutputs=doutputs,
        dproducts=dproducts,
        dread=dread,
        dfirst=dfirst,
    )
    return dfirst, dread
