"""Sums of outer products, by which weights get their gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from econmt_ops.backends.c import products
from econmt_ops.core.alignment import even, widened
from econmt_ops.dispatch.rule import device_of

ADDS_IN_FLOAT32 = TorchVersion(torch.__version__) >= "2.10"
"""True if a product of 16-bit matrices can be added to a float32 matrix on a GPU."""

_BLOCK_BYTES = 16 << 20
"""Bytes of the block of a product on a GPU whose width does not match the tiles of the kernels."""

_ROUND_ROWS = 64
"""Multiple of rows in a block of a product, matching the tiles of the kernels."""


def outer(left: Tensor, right: Tensor, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """Returns left^T right, of (K, N) and (K, M), in a type; not rounded to a narrower one in between on a GPU.

    ``width``: number of leading columns of the result to return; None: all.
    """
    width = right.shape[1] if width is None else width
    if products.serves_once(left, *left.shape, width):
        product = left.new_empty(left.shape[1], width, dtype=dtype)
        return products.Tiles(right[:, :width].t(), left.dtype).multiply(product, left.t())
    right = widened(right)
    if left.is_cuda and left.dtype != dtype == torch.float32:
        product = torch.mm(left.t(), right, out_dtype=torch.float32)
    else:
        product = (left.t() @ right).to(dtype)
    return product if product.shape[1] == width else product[:, :width].contiguous()


def add_outer(total: Tensor, left: Tensor, right: Tensor, fresh: bool = False) -> None:
    """Adds left^T right to ``total`` (N, M), in place; left (K, B, N), right (K, B, M).

    The product is computed in the type of ``left``, the sum in the type of ``total``; on a GPU and by the C library
    without rounding the product. A product of float16 matrices is not rounded to float16, whose range a sum over many
    rows may exceed.

    Columns of the operands beyond N and M are ignored; with ``fresh`` the sum is uninitialized and is overwritten.
    """
    left, right = left.reshape(-1, left.shape[2]).t(), right.reshape(-1, right.shape[2])
    if total.dtype != left.dtype and ADDS_IN_FLOAT32 and device_of(left) == "cuda":
        _add_product(total, left, right, fresh)
        return
    left, right = left[: len(total)], right[:, : total.shape[1]]
    if products.serves_once(left, *left.shape, total.shape[1]) and total.stride(1) == 1:
        products.Tiles(right.t(), left.dtype).multiply(total, left, adds=not fresh)
        return
    if left.dtype == torch.float16:
        left, right = left.to(total.dtype), right.to(total.dtype)
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if fresh else 1)
    elif fresh:
        total.copy_(left @ right)
    else:
        total += left @ right


def _add_product(total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """Adds left (N, K) times right (K, M) to ``total`` (N, M) on a GPU; by blocks of rows if a width is unaligned."""
    rows, columns = total.shape
    right = widened(right)
    size = rows
    if columns != right.shape[1]:
        size = max(1, _BLOCK_BYTES // (right.shape[1] * total.element_size() * _ROUND_ROWS)) * _ROUND_ROWS
    elif rows != even(rows, left.dtype):
        size = max(_ROUND_ROWS, rows // _ROUND_ROWS * _ROUND_ROWS)
    for begin in range(0, rows, size):
        target, part = total[begin : begin + size], left[begin : begin + size]
        if (len(part), right.shape[1]) == target.shape:
            torch.addmm(target, part, right, out_dtype=total.dtype, beta=0 if fresh else 1, out=target)
            continue
        product = torch.mm(part, right, out_dtype=total.dtype)[: len(target), :columns]
        target.copy_(product) if fresh else target.add_(product)
