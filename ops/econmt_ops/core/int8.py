"""Products with a weight of 8 bits, whose other factor is rounded to 8 bits row by row as it comes.

Rows and outputs have a step each, a 127th of their largest value, so that no result depends on another row. R rows, K
inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends import c as native

_LARGEST = 127

_LANES, _GROUP, _FILLED = 16, 4, 64
"""Outputs and inputs of a group as the C library reads it, and of what multiple of inputs it has zeros; bytes all."""


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (N, K) in 8 bits, and the steps (N,) float32 of its rows.

    A row of zeros has step 0.
    """
    values = weight.detach().to(torch.float32)
    largest = values.abs().amax(1)
    inverse = torch.where(largest > 0, _LARGEST / largest, 0.0)
    return torch.round(values * inverse[:, None]).to(torch.int8), largest / _LARGEST


def in_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """A rounded weight (N, K) as the C library reads it.

    Returns:
        (N / 16, K / 4, 16, 4), filled up with zeros, and the sum of each output's weights, int32.
    """
    filled = torch.nn.functional.pad(values, (0, -values.shape[1] % _FILLED, 0, -len(values) % _LANES))
    return grouped(filled), filled.sum(1, dtype=torch.int32)


def grouped(values: Tensor) -> Tensor:
    """A matrix (N, K), filled up, with outputs in groups of 16, inputs in those of 4 bytes: (N / 16, K / n, 16, n)."""
    count = _GROUP // values.itemsize
    words = values.contiguous().view(torch.int32).view(-1, _LANES, values.shape[1] // count)
    return words.transpose(1, 2).contiguous().view(values.dtype).view(len(words), -1, _LANES, count)


class Int8Product:
    """left weight^T + bias as :class:`econmt_ops.core.gemm.Product` has it, for float32 on a CPU.

    By the C library, where it is built; otherwise by a product of float32 of the rounded values, which is exact up to
    1,024 inputs and rounds above.

    Args:
        weight: (N, K), is rounded. bias: (N,), or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._values, self._steps = rounded(weight)
        self._bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._laid_out: tuple[Tensor, Tensor] | None = None

    def plus(self, start: Tensor, left: Tensor) -> Tensor:
        """start (R, N), contiguous, plus the product of left (R, K); ``start`` may be overwritten. There is no bias."""
        assert self._bias is None
        return self._product(left, start)

    def __call__(self, left: Tensor) -> Tensor:
        """The product of left (..., K): a new tensor (..., N)."""
        return self._product(left.reshape(-1, left.shape[-1]), None).view(*left.shape[:-1], len(self._steps))

    def _product(self, left: Tensor, start: Tensor | None) -> Tensor:
        if not native.serves(left):
            return self._by_tensors(left, start)
        if self._laid_out is None:
            self._laid_out = in_groups(self._values)
        output = left.new_empty(len(left), len(self._steps)) if start is None else start
        weight, sums = self._laid_out
        native.product_int8(left, weight, sums, self._steps, self._bias, start, output)
        return output

    def _by_tensors(self, left: Tensor, start: Tensor | None) -> Tensor:
        values, steps = rounded(left)
        product = (
            (values.to(torch.float32) @ self._values.to(torch.float32).t()) * steps[:, None] * self._steps
        )
        for more in (self._bias, start):
            product = product if more is None else product + more
        return product
