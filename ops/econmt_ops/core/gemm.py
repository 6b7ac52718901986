"""Products with one weight that are made many times: the weight is laid out for them once."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.core.packed import dense, is_available

LAYOUTS = ("row", "transposed", "packed")

MANY = 1000
"""More products than laying a weight out for them takes."""

_PACKING = 8
"""Products of few rows that must follow for packing a weight to pay (Zen 4, one core, 256 to 1,024 units, 16 and 64
rows: 3 to 11)."""

_PACKING_TURNED = 50
"""The same of a transposed view, whose packing takes five to ten times as long while oneDNN reads it as fast as a copy
(30 to 75)."""


class Layouts:
    """While it lives, products with some weights, of which several calls make a few each, share what is laid out.

    Args:
        weights: matrices whose values do not change as long.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [*weights]  # whose memory nobody else gets as long
        self._calls: dict[tuple[object, ...], int] = {}
        self._packed: dict[tuple[object, ...], Tensor] = {}
        for weight in self._weights:
            _LAYOUTS[_place(weight)] = self

    def packed(self, weight: Tensor, calls: int) -> Tensor | None:
        """The weight packed, if that pays with these calls and all before them."""
        key = (*_place(weight), *weight.shape, *weight.stride())
        self._calls[key] = self._calls.get(key, 0) + calls
        if key not in self._packed and _pays(weight, self._calls[key]):
            self._packed[key] = _pack(weight)
        return self._packed.get(key)


_LAYOUTS: WeakValueDictionary[tuple[int, int], Layouts] = WeakValueDictionary()
"""By the place of a weight."""


def _place(weight: Tensor) -> tuple[int, int]:
    """Where a matrix, or its transpose, begins in memory."""
    return int(weight.untyped_storage()._cdata), int(weight.storage_offset())


def _pays(weight: Tensor, calls: int) -> bool:
    return calls >= (_PACKING if weight.is_contiguous() else _PACKING_TURNED)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


class Product:
    """left weight^T + bias, with the weight laid out once.

    "packed" is the blocked layout that oneDNN's kernels read; each ordinary product of a few rows would pack the
    weight anew, and in float32 it would go to a slower library. Where packing would take longer than it saves, oneDNN
    gets the weight as it is; where oneDNN cannot serve, the layout is "transposed", or "row" if that takes longer.

    Args:
        weight: (N, K).
        bias: (N,), or None.
        layout: one of LAYOUTS.
        calls: how many products will be made.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, layout: str = "packed", calls: int = MANY
    ) -> None:
        self._by_onednn = layout == "packed" and weight.numel() > 0 and is_available(weight)
        self._bias = None if bias is None else dense(bias)
        if self._by_onednn:
            shared = _LAYOUTS.get(_place(weight))
            if shared is not None:
                packed = shared.packed(weight, calls)
            else:
                packed = _pack(weight) if _pays(weight, calls) else None
            self._weight = dense(weight.detach()) if packed is None else packed
        else:
            pays = layout != "row" and _pays(weight, calls)
            self._weight = weight.t().contiguous() if pays else weight.t()

    def plus(self, start: Tensor, left: Tensor) -> Tensor:
        """start (M, N), contiguous, plus the product of left (M, K); ``start`` may be overwritten. There is no bias."""
        assert self._bias is None
        if self._by_onednn:
            return self._plus(start, left)
        return start.addmm_(left, self._weight)

    def into(self, out: Tensor, left: Tensor, start: Tensor | None = None) -> None:
        """Writes the product of left (M, K) to ``out`` (M, N), whose row stride may be any.

        Args:
            out, left: see above.
            start: (M, N) is added in place of the bias; may be ``out`` itself.
        """
        if not self._by_onednn:
            start = self._bias if start is None else start
            if start is None:
                torch.mm(left, self._weight, out=out)
            else:
                torch.addmm(start, left, self._weight, out=out)
        elif start is None:
            out.copy_(self(left))
        else:
            out.copy_(self._plus(start.contiguous(), left))

    def _plus(self, start: Tensor, left: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(left, start, self._weight, None, "add")
        return result

    def share(self, start: Tensor, left: Tensor) -> Tensor | None:
        """Adds the product of left (M, K) to ``start`` (M, N), in place; where oneDNN cannot, returns it instead.

        It is what a step's kernel takes as ``recurrent``: where it reads ``start`` it can add the product too.
        """
        if self._by_onednn:
            return self(left)
        start.addmm_(left, self._weight)
        return None

    def __call__(self, left: Tensor, thin: Tensor | None = None) -> Tensor:  # noqa: ARG002 - as of factors
        """The product of left (..., K): a new tensor (..., N)."""
        if self._by_onednn:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(
                left, self._weight, self._bias, "none", [], ""
            )
            return result
        rows = left.reshape(-1, left.shape[-1])
        product = rows.mm(self._weight) if self._bias is None else torch.addmm(self._bias, rows, self._weight)
        return product.view(*left.shape[:-1], product.shape[1])


def add_rows(values: Tensor) -> Tensor:
    """The sum over the first two axes of (K, B, N).

    Without our library by a product: on a CPU sum() of 16-bit values takes eight times as long; on a GPU it takes a
    workspace larger than the values.
    """
    rows = values.reshape(-1, values.shape[2])
    if native.serves(rows):
        total = rows.new_zeros(rows.shape[1], dtype=torch.float32)
        native.add_rows(total, rows)
        return total
    return rows.new_ones(1, len(rows)).mm(rows).view(-1)
