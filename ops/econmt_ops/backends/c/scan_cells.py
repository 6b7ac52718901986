"""Layers of a linear recurrence without their products, in the C library: one pass per direction, see `scan_cells.h`.

Sizes: B batch, T steps, H hidden, K parts of the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends.c import call
from econmt_ops.cells.scan import ScanCell

_RECURRENCES, _OUTPUTS = ("coupled", "gated", "shared"), ("plain", "relu", "gate", "highway")
"""Names in the order of their numbers in kernels.h."""

_LINE, _WIDEST = 16, 256
"""Columns of a task: a multiple of the first, a cache line of float32, and at most the second."""


def _sizes(cell: ScanCell, products: Tensor, hidden: int) -> dict[str, int]:
    """Returns the fields that the structures of both passes have."""
    rows, steps, columns = products.shape
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
    }


def forward(
    cell: ScanCell,
    products: Tensor,
    read: Tensor,
    first: Tensor,
    lengths: Tensor | None,
    outputs: Tensor,
    cells: Tensor | None,
) -> Tensor:
    """Writes the results of a recurrence; returns c (B, H) after each row's last step.

    Args:
        cell: defines the recurrence.
        products: (B, T, K H), contiguous, with the bias.
        read: (B, T, I), the input, which a highway reads if I is H.
        first: (B, H) float32. lengths: (B,), from 0 to T; or None.
        outputs: (B, T, H) is written, in the type of the products, and cells (B, T, H) float32, c after each step,
            unless None. Both may be slices of steps.
    """
    last = torch.empty_like(first, memory_format=torch.contiguous_format)
    call(
        "scan_cell_forward",
        products.numel(),
        **_sizes(cell, products, first.shape[1]),
        products=products,
        read=read,
        initial=first,
        lengths=lengths,
        outputs=outputs,
        cells=cells,
        last=last,
    )
    return last


def backward(
    cell: ScanCell,
    products: Tensor,
    read: Tensor,
    first: Tensor,
    lengths: Tensor | None,
    cells: Tensor,
    doutputs: Tensor | None,
    dlast: Tensor,
    dproducts: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Writes the gradient of the products; returns the gradients of ``first`` and, if a highway reads it, of the input.

    Args:
        cell, products, read, first, lengths: as in :func:`forward`; ``first`` may have any stride. cells: as written
            there.
        doutputs: (B, T, H), or None. dlast: (B, H) float32.
        dproducts: (B, T, K H), contiguous, is written; may be ``products`` itself.
    """
    hidden = first.shape[1]
    dfirst = dlast.clone(memory_format=torch.contiguous_format)
    dread = None
    if cell.output.name == "highway" and products.shape[2] == cell.gates * hidden:
        dread = torch.empty(read.shape, dtype=read.dtype)
    call(
        "scan_cell_backward",
        2 * products.numel(),
        **_sizes(cell, products, hidden),
        products=products,
        read=read,
        initial=first,
        lengths=lengths,
        cells=cells,
        doutputs=doutputs,
        dproducts=dproducts,
        dread=dread,
        dfirst=dfirst,
    )
    return dfirst, dread
