"""Products with one weight that are made many times: the weight is laid out for them once."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.linear.packed import is_available

LAYOUTS = ("row", "transposed", "packed")


class Product:
    """left weight^T + bias, with the weight laid out once.

    "packed" is the blocked layout that oneDNN's kernels read; each ordinary product of a few rows would pack the
    weight anew, and in float32 it would go to a slower library. Where oneDNN cannot serve, it is "transposed".

    Args:
        weight: (N, K).
        bias: (N,), or None.
        layout: one of LAYOUTS.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, layout: str = "packed") -> None:
        self._packed = layout == "packed" and weight.numel() > 0 and is_available(weight)
        self._bias = bias
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        else:
            self._weight = weight.t() if layout == "row" else weight.t().contiguous()

    def __call__(self, left: Tensor) -> Tensor:
        """The product of left (..., K): a new tensor (..., N)."""
        if self._packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(
                left, self._weight, self._bias, "none", [], ""
            )
            return result
        rows = left.reshape(-1, left.shape[-1])
        product = rows.mm(self._weight) if self._bias is None else torch.addmm(self._bias, rows, self._weight)
        return product.view(*left.shape[:-1], product.shape[1])


def add_rows(values: Tensor) -> Tensor:
    """The sum over the first two axes of (K, B, N), by a product: sum() of 16-bit values takes eight times as long."""
    rows = values.reshape(-1, values.shape[2])
    return rows.new_ones(1, len(rows)).mm(rows).view(-1)
