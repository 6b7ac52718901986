"""Blocks of steps and rows whose recomputed intermediate results fit a workspace of fixed size.

Shapes: T steps, K steps of a block, B batch; time comes first: (T, B, .).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from econmt_ops.core.alignment import even, widened
from econmt_ops.dispatch.rule import device_of

STASHES = ("least", "outputs", "attention", "cells", "gates")
"""Levels of what a forward pass keeps, each beside the levels before it: the outputs (every h, and c once a block), in
small blocks or in usual ones; the attention weights; every c; the gates."""

_BLOCK_BYTES = 8 << 20
"""Bytes of the gates of one layer in one block of steps, chosen for the caches of a CPU."""

_LARGE_BLOCK_BYTES = 16 << 20
"""Bytes of such a block for kernels on a GPU, which needs larger products: on an H100 a training step of the iwslt
recipe takes 4 % less time than with half as much, for 30 MB more of 639."""

_EVENNESS = 8
"""Inverse of the share of a block by which the first one is shorter, about the memory of what it copies."""

_LEAST_DIVISOR = 2
"""Divisor of these bytes if the least is kept."""

_PART_BYTES = 4 << 20
"""Bytes of the intermediate results of one step for some source positions."""

_ROUND_ROWS = 64
"""Multiple of rows in a block of a product, matching the tiles of the kernels."""

ADDS_IN_FLOAT32 = TorchVersion(torch.__version__) >= "2.10"
"""True if a product of 16-bit matrices can be added to a float32 matrix on a GPU."""


def reaches(stash: str, level: str) -> bool:
    """Returns True if a stash level keeps the results of ``level``."""
    return STASHES.index(stash) >= STASHES.index(level)


def split_blocks(
    steps: int, batch: int, hidden: int, dtype: torch.dtype, large: bool = False, stash: str = "outputs"
) -> list[tuple[int, int]]:
    """Divides steps into blocks (begin, end) whose gates of type ``dtype`` fit the workspace, or the ``large`` one.

    The workspace is smaller for the ``stash`` "least". Large blocks are nearly even, so that as many launches take less
    memory.

    The first block is shorter than the others, because it copies its inputs: the initial state is stored separately.
    """
    space = _LARGE_BLOCK_BYTES if large else _BLOCK_BYTES
    if stash == "least":
        space //= _LEAST_DIVISOR
    size = max(1, space // max(1, batch * 4 * hidden * dtype.itemsize))
    if large and steps:
        count = -(-steps // size)
        size = min(size, -(-_EVENNESS * steps // (_EVENNESS * count - 1)))
    return [(max(0, end - size), end) for end in range(steps, 0, -size)][::-1]


def split_rows(batch: int, positions: int, width: int) -> list[slice]:
    """Divides a batch into parts whose source positions, ``width`` bytes each, fit the workspace."""
    size = max(1, _PART_BYTES // max(1, positions * width))
    return [slice(begin, begin + size) for begin in range(0, max(1, batch), size)]


def rows_of(tensor: Tensor) -> Tensor:
    """Returns the tensor (..., N) with a contiguous last axis."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def previous(sequence: Tensor, first: Tensor, begin: int, end: int) -> Tensor:
    """Returns the entries begin - 1 to end - 1 of a sequence (T, B, H) that starts after ``first`` (B, H)."""
    if begin > 0:
        return sequence[begin - 1 : end - 1]
    return torch.cat([first.unsqueeze(0), sequence[: end - 1]], 0)


def outer(left: Tensor, right: Tensor, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """Returns left^T right in a type; a type that is wider than the operands' is not rounded in between on a GPU.

    Args:
        left: (K, N).
        right: (K, M), M `even` or not.
        dtype: Type of the result.
        width: Number of leading columns of the result to return; None: all.
    """
    width = right.shape[1] if width is None else width
    right = widened(right)
    if left.is_cuda and left.dtype != dtype == torch.float32:
        product: Tensor = torch.mm(left.t(), right, out_dtype=torch.float32)
    else:
        product = (left.t() @ right).to(dtype)
    return product if product.shape[1] == width else product[:, :width].contiguous()


def add_outer(total: Tensor, left: Tensor, right: Tensor, fresh: bool = False) -> None:
    """Adds left^T right to ``total`` (N, M), in place; left (K, B, N), right (K, B, M).

    The product is computed in the type of ``left``, the sum in the type of ``total``, on a GPU in one kernel. A product
    of float16 matrices is not rounded to float16, whose range a sum over many rows may exceed.

    Args:
        total: Sum, (N, M).
        left, right: Operands; columns beyond N and M are ignored.
        fresh: True if ``total`` is uninitialized and is to be overwritten.
    """
    left, right = left.reshape(-1, left.shape[2]).t(), right.reshape(-1, right.shape[2])
    if total.dtype != left.dtype and ADDS_IN_FLOAT32 and device_of(left) == "cuda":
        _add_product(total, left, right, fresh)
        return
    left, right = left[: len(total)], right[:, : total.shape[1]]
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
        size = (
            max(1, _LARGE_BLOCK_BYTES // (right.shape[1] * total.element_size() * _ROUND_ROWS)) * _ROUND_ROWS
        )
    elif rows != even(rows, left.dtype):
        size = max(_ROUND_ROWS, rows // _ROUND_ROWS * _ROUND_ROWS)
    for begin in range(0, rows, size):
        target, part = total[begin : begin + size], left[begin : begin + size]
        if (len(part), right.shape[1]) == target.shape:
            torch.addmm(target, part, right, out_dtype=total.dtype, beta=0 if fresh else 1, out=target)
            continue
        product = torch.mm(part, right, out_dtype=total.dtype)[: len(target), :columns]
        target.copy_(product) if fresh else target.add_(product)
