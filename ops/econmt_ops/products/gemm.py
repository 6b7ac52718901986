"""Repeated products with one weight, which is prepacked into the layout that the fastest library reads."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.backends.c import products
from econmt_ops.backends.c.products import Tiles
from econmt_ops.core.precision import matmul_tf32
from econmt_ops.products.packed import dense, is_available

MANY = 1000
"""Number of products for which prepacking a weight always pays."""

_PACKING = 8
"""Number of products of few rows from which on packing a weight pays; measured as 3 to 11 on one Zen 4 core, for 256 to
1,024 units and 16 and 64 rows."""

_PACKING_TRANSPOSED = 50
"""Number for a transposed view, measured as 30 to 75: packing it takes five to ten times as long, and oneDNN reads the
view as fast as a contiguous copy."""


class Layouts:
    """Cache of prepacked weights that several calls share, for as long as the object lives.

    A weight is packed once the number of products of all calls together makes up for packing it.

    Args:
        weights: Matrices whose values do not change while the object lives.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [*weights]  # keeps their memory from being reused
        self._calls: dict[tuple[object, ...], int] = {}
        self._packed: dict[tuple[object, ...], Tensor | Tiles] = {}
        for weight in self._weights:
            _LAYOUTS[_memory_key(weight)] = self

    def packed(self, weight: Tensor, calls: int) -> Tensor | Tiles | None:
        """Returns the packed weight if packing pays for these calls together with all earlier ones, else None."""
        key = (*_memory_key(weight), *weight.shape, *weight.stride())
        self._calls[key] = self._calls.get(key, 0) + calls
        tiled = weight.dtype if products.serves(weight) else None
        if key not in self._packed and _pays(weight, self._calls[key], tiled):
            self._packed[key] = _pack(weight, tiled)
        return self._packed.get(key)


_LAYOUTS: WeakValueDictionary[tuple[int, int], Layouts] = WeakValueDictionary()
"""Cache responsible for a weight, by the weight's position in memory."""


def _memory_key(weight: Tensor) -> tuple[int, int]:
    """Returns the storage and the offset at which a matrix, or its transpose, begins."""
    return int(weight.untyped_storage()._cdata), int(weight.storage_offset())


def _pays(weight: Tensor, calls: int, tiled: torch.dtype | None = None) -> bool:
    """Returns True if packing a weight pays for so many products.

    Args:
        tiled: Type of the products if the C library computes them. It reads packed weights only, and in bfloat16, where
            its products are much faster than others, packing always pays.
    """
    if tiled is not None:
        return tiled == torch.bfloat16 or calls >= _PACKING
    return calls >= (_PACKING if weight.is_contiguous() else _PACKING_TRANSPOSED)


def _pack(weight: Tensor, tiled: torch.dtype | None) -> Tensor | Tiles:
    if tiled is not None:
        return Tiles(weight, tiled)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


class Product:
    """Product left weight^T + bias with a weight that is prepacked once.

    "packed" is the layout of the C library's products, where it has them for this processor and type, and otherwise the
    blocked layout of oneDNN's kernels. Without it each product of a few rows would pack the weight again, and in
    float32 PyTorch would use a slower library. If packing takes longer than it saves, oneDNN reads the weight as it is.
    Where neither is available, the layout is "transposed", or "row" if transposing does not pay, as on a GPU, whose
    products of few rows in 16 bits or TF32 take no longer with it.

    Args:
        weight: (N, K).
        bias: (N,), or None.
        layout: "packed" or "row".
        calls: Number of products that will be computed.
        like: Tensor of the products' type, to which weight and bias are rounded; None: they have that type.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        layout: str = "packed",
        calls: int = MANY,
        like: Tensor | None = None,
    ) -> None:
        operand = weight if like is None else like
        tiled = operand.dtype if products.serves(operand) else None
        if like is not None:
            bias = None if bias is None else bias.to(like.dtype)
            # Only the C library rounds a weight as it packs it.
            packs = layout == "packed" and weight.numel() > 0 and is_available(weight)
            if tiled != torch.bfloat16 or not packs or _memory_key(weight) in _LAYOUTS:
                weight = weight.to(like.dtype)
        self._by_onednn = layout == "packed" and weight.numel() > 0 and is_available(weight)
        self._tiles: Tiles | None = None
        if self._by_onednn:
            shared = _LAYOUTS.get(_memory_key(weight))
            if shared is not None:
                packed = shared.packed(weight, calls)
            else:
                packed = _pack(weight, tiled) if _pays(weight, calls, tiled) else None
            if isinstance(packed, Tiles):
                self._tiles, self._bias = packed, None if bias is None else bias.float().contiguous()
                return
            self._weight = dense(weight.detach()) if packed is None else packed
        else:
            exact = weight.dtype == torch.float32 and not matmul_tf32()
            pays = layout != "row" and (exact or not weight.is_cuda) and _pays(weight, calls)
            self._weight = weight.t().contiguous() if pays else weight.t()
        self._bias = None if bias is None else dense(bias)

    def plus(self, start: Tensor, left: Tensor) -> Tensor:
        """Returns start (M, N), contiguous, plus the product of left (M, K), without bias; may overwrite ``start``."""
        assert self._bias is None
        if self._tiles is not None:
            return self._tiles.multiply(start, left, adds=True)
        if self._by_onednn:
            return self._plus(start, left)
        return start.addmm_(left, self._weight)

    def into(self, out: Tensor, left: Tensor, start: Tensor | None = None) -> None:
        """Writes the product of left (M, K) to ``out`` (M, N), which may have any row stride.

        ``start`` (M, N), which may be ``out`` itself, is added in place of the bias.
        """
        if self._tiles is not None:
            if start is not None and start is not out:
                out.copy_(start)
            self._tiles.multiply(out, left, None if start is not None else self._bias, adds=start is not None)
        elif not self._by_onednn:
            start = self._bias if start is None else start
            if start is None:
                torch.mm(left, self._weight, out=out)
            else:
                torch.addmm(start, left, self._weight, out=out)
        else:
            out.copy_(self(left) if start is None else self._plus(start.contiguous(), left))

    def _plus(self, start: Tensor, left: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(left, start, self._weight, None, "add")
        return result

    def share(self, start: Tensor, left: Tensor) -> Tensor | None:
        """Adds the product of left (M, K) to ``start`` (M, N) in place, or returns it if oneDNN computes it.

        A step's kernel takes the returned product as ``recurrent`` and adds it where it reads ``start``.
        """
        if self._tiles is not None:
            self._tiles.multiply(start, left, adds=True)
            return None
        if self._by_onednn:
            return self(left)
        start.addmm_(left, self._weight)
        return None

    def __call__(self, left: Tensor, thin: Tensor | None = None) -> Tensor:  # noqa: ARG002 - as LowRankProduct
        """Returns the product of left (..., K), a new tensor (..., N)."""
        if self._by_onednn and self._tiles is None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(
                left, self._weight, self._bias, "none", [], ""
            )
            return result
        rows = left.reshape(-1, left.shape[-1])
        if self._tiles is not None:
            product = self._tiles.multiply(left.new_empty(len(rows), self._tiles.outputs), rows, self._bias)
        elif self._bias is None:
            product = rows.mm(self._weight)
        else:
            product = torch.addmm(self._bias, rows, self._weight)
        return product.view(*left.shape[:-1], product.shape[1])


def multiply(
    left: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, adds: bool = False
) -> Tensor:
    """Computes left (M, K) weight^T + bias once, with a weight (N, K) that is not kept prepacked.

    Args:
        bias: (N,), or None.
        out: (M, N), with a contiguous last axis, is written; None: a new tensor.
        adds: True to add the product to ``out``; then there is no bias.
    """
    if weight.numel() > 0 and products.serves_once(left, len(left), *weight.shape):
        out = left.new_empty(len(left), len(weight)) if out is None else out
        bias = None if bias is None else bias.float().contiguous()
        return Tiles(weight, left.dtype).multiply(out, left, bias, adds)
    if adds:
        assert out is not None
        assert bias is None
        return out.addmm_(left, weight.t())
    if bias is None:
        product: Tensor = torch.mm(left, weight.t(), out=out)
        return product
    return torch.addmm(bias, left, weight.t(), out=out)


def add_rows(values: Tensor) -> Tensor:
    """Returns the sum over the first two axes of (K, B, N).

    Without the C library the sum is a matrix product: on a CPU sum() of 16-bit values takes eight times as long; on a
    GPU its workspace is larger than the values.
    """
    rows = values.reshape(-1, values.shape[2])
    if native.serves(rows):
        total = rows.new_zeros(rows.shape[1], dtype=torch.float32)
        native.add_rows(total, rows)
        return total
    return rows.new_ones(1, len(rows)).mm(rows).view(-1)
