"""Products of an 8-bit weight and activations that are rounded to 8 bits row by row.

Each row of the activations and each output has its own scale, 1/127 of its largest absolute value, so that no result
depends on another row. R rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends import c as native

_LARGEST = 127

_LANES, _GROUP, _FILLED = 16, 4, 64
"""Outputs per group in the C library's layout, bytes of their inputs, and the multiple of bytes to which inputs are
padded with zeros, unless they are float32."""


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight (N, K) to int8; also returns the scales (N,) float32 of its rows, 0 for a row of zeros."""
    values = weight.detach().to(torch.float32)
    largest = values.abs().amax(1)
    inverse = torch.where(largest > 0, _LARGEST / largest, 0.0)
    return torch.round(values * inverse[:, None]).to(torch.int8), largest / _LARGEST


def in_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Converts a rounded weight (N, K) to the layout of the C library.

    Returns:
        The weight (N / 16, K / 4, 16, 4), padded with zeros, and the sum of each output's weights, int32.
    """
    filled = padded(values)
    return grouped(filled), filled.sum(1, dtype=torch.int32)


def padded(values: Tensor) -> Tensor:
    """Pads a weight (N, K) in float32, bfloat16 or int8 with zeros, as the C library's layout needs it."""
    inputs = 0 if values.dtype == torch.float32 else -values.shape[1] % (_FILLED // values.itemsize)
    return torch.nn.functional.pad(values, (0, inputs, 0, -len(values) % _LANES))


def grouped(values: Tensor) -> Tensor:
    """Groups a padded matrix (N, K) by 16 outputs and by inputs that fill 4 bytes: (N / 16, K / n, 16, n)."""
    count = _GROUP // values.itemsize
    words = values.contiguous().view(torch.int32).view(-1, _LANES, values.shape[1] // count)
    return words.transpose(1, 2).contiguous().view(values.dtype).view(len(words), -1, _LANES, count)


class Int8Product:
    """Product left weight^T + bias as :class:`econmt_ops.core.gemm.Product`, in 8 bits, for float32 on a CPU.

    It uses the C library if that is built, otherwise a float32 product of the rounded values, which is exact for up to
    1,024 inputs.

    Args:
        weight: (N, K), rounded to 8 bits. bias: (N,), or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._values, self._steps = rounded(weight)
        self._bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._prepacked: tuple[Tensor, Tensor] | None = None

    def plus(self, start: Tensor, left: Tensor) -> Tensor:
        """Returns start (R, N), contiguous, plus the product of left (R, K), without bias; may overwrite ``start``."""
        assert self._bias is None
        return self._product(left, start)

    def __call__(self, left: Tensor) -> Tensor:
        """Returns the product of left (..., K), a new tensor (..., N)."""
        return self._product(left.reshape(-1, left.shape[-1]), None).view(*left.shape[:-1], len(self._steps))

    def _product(self, left: Tensor, start: Tensor | None) -> Tensor:
        if not native.serves(left):
            return self._by_tensors(left, start)
        if self._prepacked is None:
            self._prepacked = in_groups(self._values)
        output = left.new_empty(len(left), len(self._steps)) if start is None else start
        weight, sums = self._prepacked
        native.call(
            "product_int8",
            left.numel(),
            rows=len(left),
            inputs=left.shape[1],
            outputs=len(self._steps),
            left=left,
            weight=weight,
            sums=sums,
            scales=self._steps,
            bias=self._bias,
            start=start,
            output=output,
        )
        return output

    def _by_tensors(self, left: Tensor, start: Tensor | None) -> Tensor:
        values, steps = rounded(left)
        product = (
            (values.to(torch.float32) @ self._values.to(torch.float32).t()) * steps[:, None] * self._steps
        )
        for more in (self._bias, start):
            product = product if more is None else product + more
        return product
