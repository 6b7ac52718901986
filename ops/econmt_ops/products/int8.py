"""Products of an 8-bit weight and activations that are rounded to 8 bits row by row, so that no row affects another.

R rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.core.int8 import in_groups, rounded


class Int8Product:
    """Product left weight^T + bias as :class:`econmt_ops.products.gemm.Product`, in 8 bits, for float32 on a CPU.

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
            values, steps = rounded(left)
            product = (values.float() @ self._values.float().t()) * steps[:, None] * self._steps
            for more in (self._bias, start):
                product = product if more is None else product + more
            return product
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
