"""Weights laid out once for the many products that a search makes with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.core.gemm import Product
from econmt_ops.core.int8 import Int8Product
from econmt_ops.core.weights import LowRank, Matrix

TABLE_BYTES = 256 << 20
"""Maximum size in bytes of a table of the words' shares in the gates of the bottom layer."""


def value_type(products: torch.dtype) -> torch.dtype:
    """The type of what goes into products of a type and comes out: float32 where their factors have 8 bits."""
    return torch.float32 if products == torch.int8 else products


def prepacked(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product | Int8Product:
    """The product with a weight (N, K), in the layout that products of few rows read fastest; on a GPU as it is.

    ``dtype``: of the product; int8: both factors are rounded to 8 bits.
    """
    if dtype == torch.int8:
        return Int8Product(weight, bias)
    layout = "packed" if weight.device.type == "cpu" else "row"
    return Product(weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype), layout)


class Gates:
    """The gates of one layer before their nonlinearities: the products of several inputs, added.

    Args:
        weights: (4H, .) of each input. bias: (4H,) or None. dtype: of the products.

    Attributes:
        dtype: of what goes in and comes out.
    """

    def __init__(self, weights: Sequence[Matrix], bias: Tensor | None, dtype: torch.dtype) -> None:
        self.dtype = value_type(dtype)
        # Of factorised weights each input meets its right factor; what that gives meets all left factors at once.
        self._right = [prepacked(part.right, None, dtype) for part in weights if isinstance(part, LowRank)]
        whole = [part.left if isinstance(part, LowRank) else part for part in weights]
        self._product = prepacked(torch.cat(whole, 1), bias, dtype)

    def __call__(self, *inputs: Tensor, start: Tensor | None = None) -> Tensor:
        """From each weight's inputs (R, .): (R, 4H), a new tensor.

        With ``start`` (R, 4H), which may be overwritten, it is added, and there must be no bias.
        """
        if self._right:
            inputs = tuple(right(part) for right, part in zip(self._right, inputs, strict=True))
        joined = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
        return self._product(joined) if start is None else self._product.plus(start, joined)


def is_watched() -> bool:
    """Returns True if a dispatch mode is active; fake tensors, for example, have no values to inspect."""
    return bool(torch._C._len_torch_dispatch_stack())
