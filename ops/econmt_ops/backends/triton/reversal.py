"""Reverses rows within their own lengths in one kernel, for `econmt_ops.products.reversal.reverse_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024
"""Maximum values that a program moves."""


@triton.jit
def reversal_rows(values, results, lengths, positions, width, COLUMNS: tl.constexpr):
    """Copies a tile of columns of one position of a row; values and results (B, T, W)."""
    row, position = tl.program_id(0).to(tl.int64) // positions, tl.program_id(0) % positions
    length = tl.load(lengths + row).to(tl.int32)
    source = tl.where(position < length, length - 1 - position, position)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    moved = tl.load(values + (row * positions + source) * width + column, mask=column < width)
    tl.store(results + (row * positions + position) * width + column, moved, mask=column < width)


def reverse(values: Tensor, lengths: Tensor) -> Tensor:
    """Reverses each row of ``values`` (B, T, ...), of any type, within its own length.

    Args:
        values: (B, T, ...).
        lengths: (B,), on the same device, each at most T; positions beyond a length are copied unchanged.
    """
    values = values.contiguous()
    results = torch.empty_like(values)
    if values.numel():
        rows, positions = values.shape[:2]
        width = values.numel() // (rows * positions)
        columns = min(_COLUMNS, triton.next_power_of_2(width))
        grid = (rows * positions, triton.cdiv(width, columns))  # of which the other axes have 65,535 at most
        moved = [each.view(torch.int8) if each.dtype == torch.bool else each for each in (values, results)]
        reversal_rows[grid](*moved, lengths, positions, width, COLUMNS=columns)
    return results
