"""Float32 values in float16, in units: powers of two by which they are multiplied to be float32 again.

Float16 has the mantissa of TF32. In units of its own a tensor has values up to 2^14, and the digits of those above
2^-28 of the largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.dispatch.device_limits import on_gpu_of

_TILE = 16384
"""Values of a matrix that a program reads at once."""


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


def in_units(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 values (B, M, N) in float16, and the units of the B matrices (B,); one launch."""
    units, values = tensor.new_empty(len(tensor)), tensor.new_empty(tensor.shape, dtype=torch.float16)
    if tensor.numel():
        rows, width = tensor.shape[1:]
        arguments = tensor.contiguous(), values, units, rows
        with on_gpu_of([tensor]):
            _divide_matrix[(len(tensor),)](*arguments, WIDTH=width, TILE=_TILE, num_warps=16)
    return values, units
