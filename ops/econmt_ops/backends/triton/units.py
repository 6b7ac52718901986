"""Float32 values in float16, in units: powers of two by which they are multiplied to be float32 again.

Float16 has the mantissa of TF32. In units of its own a tensor has values up to 2^14, and the digits of those above
2^-28 of the largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.triton.cells import row_stride
from econmt_ops.core.chunks import rows_of

_TILE = 16384
"""Values of a matrix that a program reads at once."""


@triton.jit
def _divide_row(source, unit, target, source_row, target_row, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    values = tl.load(source + row * source_row + column, mask=column < WIDTH, other=0.0) / tl.load(unit)
    tl.store(target + row * target_row + column, values.to(tl.float16), mask=column < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _divide_matrix(source, target, units, rows, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Writes a matrix in float16, divided by the unit of its largest value, and the unit."""
    count, matrix = rows * WIDTH, tl.program_id(0).to(tl.int64)
    source, target = source + matrix * count, target + matrix * count
    most = tl.zeros([TILE], tl.float32)
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        most = tl.maximum(most, tl.abs(tl.load(source + place, mask=place < count, other=0.0)))
    exponent = tl.ceil(tl.log2(tl.minimum(tl.maximum(tl.max(most, 0), 1e-30), 3e38))) - 14.0
    tl.store(units + matrix, tl.exp2(exponent))
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        values = tl.load(source + place, mask=place < count, other=0.0) * tl.exp2(-exponent)
        tl.store(target + place, values.to(tl.float16), mask=place < count)


def units_of(largest: Tensor) -> Tensor:
    """Returns the units of float32 values up to ``largest``."""
    return torch.exp2(largest.clamp(1e-30, torch.finfo(torch.float32).max).log2().ceil() - 14.0)


def divide(source: Tensor, unit: Tensor, target: Tensor) -> None:
    """Writes the source (R, N) in float16 to the target (R, N), whose rows may have any stride, in one unit (1,)."""
    source, width = rows_of(source), source.shape[1]
    strides, tile = (row_stride(source), row_stride(target)), triton.next_power_of_2(width)
    _divide_row[(len(source),)](source, unit, target, *strides, WIDTH=width, TILE=tile, num_warps=1)


def in_units(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 values (B, M, N) in float16, and the units of the B matrices (B,); one launch."""
    units, values = tensor.new_empty(len(tensor)), tensor.new_empty(tensor.shape, dtype=torch.float16)
    if tensor.numel():
        rows, width = tensor.shape[1:]
        arguments = tensor.contiguous(), values, units, rows
        _divide_matrix[(len(tensor),)](*arguments, WIDTH=width, TILE=_TILE, num_warps=16)
    return values, units
