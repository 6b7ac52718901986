"""Matrix widths at which a GPU's products are fast.

Tensor cores load 16 bytes at a time. For matrices whose rows are not a multiple of that, in 16-bit types or in float32
with TF32, libraries use kernels that are two to four times as slow, even if the rows begin at such multiples: 4,480 x
1,500 by 1,500 x 6,000 takes 413 us in 16 bits on an H200, with four extra columns of zeros 119 us, and copying the
4,480 rows takes 12 us.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.core.precision import matmul_tf32

_BYTES = 16


def even(size: int, dtype: torch.dtype) -> int:
    """Returns the smallest width of at least ``size`` at which products of this type are fast."""
    if dtype.itemsize > 4 or (dtype.itemsize == 4 and not matmul_tf32()):
        return size
    units = _BYTES // dtype.itemsize
    return -(-size // units) * units


def widened(matrix: Tensor) -> Tensor:
    """Returns a matrix (M, K), padded with columns of zeros to an `even` width."""
    width = even(matrix.shape[1], matrix.dtype)
    if width == matrix.shape[1]:
        return matrix
    wide = matrix.new_empty(matrix.shape[0], width)
    wide[:, : matrix.shape[1]] = matrix
    wide[:, matrix.shape[1] :] = 0.0
    return wide
