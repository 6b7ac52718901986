"""Layers of a linear recurrence without their products, in the C library: one pass per direction, see `scan_cells.h`.

Sizes: B batch, T steps, H hidden, K parts of the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends.c import call, rows_of
from econmt_ops.cells.scan import ScanCell

_RECURRENCES, _OUTPUTS = ("coupled", "gated", "shared"), ("plain", "relu", "gate", "highway")
"""Names in the order of their numbers in kernels.h."""

_LINE, _WIDEST = 16, 256
"""Columns of a task: a multiple of the first, a cache line of float32, and at most the second."""


def _sizes(cell: ScanCell, products: Tensor, hidden: int) -> tuple[int, ...]:
    """Returns the first fields of both structures."""
    rows, steps, wide = products.shape
    numbers = _RECURRENCES.index(cell.recurrence.name), _OUTPUTS.index(cell.output.name)
    narrow = products.dtype == torch.bfloat16
    groups = max(1, -(-4 * torch.get_num_threads() // max(1, rows)))
    width = min(_WIDEST, max(_LINE, -(-hidden // (groups * _LINE)) * _LINE))
    return narrow, wide // hidden, cell.gates - 1, *numbers, cell.squashes, rows, steps, hidden, width


def _strides(**tensors: Tensor | None) -> dict[str, int]:
    """Returns the stride fields of tensors (B, T, H)."""
    return {
        f"{name}_{kind}": tensor.stride(axis)
        for name, tensor in tensors.items()
        if tensor is not None
        for axis, kind in enumerate(("batch", "step"))
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
    read, first = rows_of(read), first.contiguous()
    last = torch.empty_like(first)
    assert outputs.stride(-1) == 1
    assert products.is_contiguous()
    call(
        "scan_cell_forward",
        products.numel(),
        _sizes(cell, products, first.shape[1]),
        products=products,
        read=read,
        initial=first,
        lengths=lengths,
        outputs=outputs,
        cells=cells,
        last=last,
        **_strides(read=read, outputs=outputs, cells=cells),
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
    read, first = rows_of(read), rows_of(first)
    doutputs = None if doutputs is None else rows_of(doutputs)
    dfirst = dlast.clone(memory_format=torch.contiguous_format)
    dread = None
    if cell.output.name == "highway" and products.shape[2] == cell.gates * hidden:
        dread = torch.empty(read.shape, dtype=read.dtype)
    assert products.is_contiguous()
    assert dproducts.is_contiguous()
    call(
        "scan_cell_backward",
        2 * products.numel(),
        _sizes(cell, products, hidden),
        products=products,
        read=read,
        initial=first,
        lengths=lengths,
        cells=cells,
        doutputs=doutputs,
        dproducts=dproducts,
        dread=dread,
        dfirst=dfirst,
        **_strides(read=read, cells=cells, doutputs=doutputs),
    )
    return dfirst, dread
