"""Widths at which a GPU's products are fast.

Tensor cores are fed 16 bytes at a time. Of 16-bit matrices whose rows are no multiple of that a library takes kernels
that are three to four times as slow, even where the rows begin at such multiples: 4,480 x 1,500 by 1,500 x 6,000 takes
413 us on an H200, with four columns of zeros more 119 us, and copying the 4,480 rows 12 us.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = 16


def even(size: int, dtype: torch.dtype) -> int:
    """The least width, not below ``size``, at which products of this type are fast."""
    if dtype.itemsize != 2:
        return size
    units = _BYTES // dtype.itemsize
    return -(-size // units) * units


def widened(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A matrix (M, K) in a type (its own), of `even` width: with columns of zeros, or itself where nothing is to do."""
    dtype = matrix.dtype if dtype is None else dtype
    width = even(matrix.shape[1], dtype)
    if width == matrix.shape[1]:
        return matrix.to(dtype)
    wide = matrix.new_empty(matrix.shape[0], width, dtype=dtype)
    wide[:, : matrix.shape[1]] = matrix
    wide[:, matrix.shape[1] :] = 0.0
    return wide
