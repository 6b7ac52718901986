"""Blocks of steps: how the recomputing ops cut a sequence so that what they make again fits a workspace.

Shapes: T steps, K steps of a block, B batch; time comes first: (T, B, .).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from econmt_ops.core.alignment import even, widened
from econmt_ops.dispatch.rule import device_of

STASHES = ("outputs", "attention", "cells", "gates")
"""What a forward pass keeps, each level beside what those before it keep: the outputs (every h, and c once a
block); the attention weights; every c; the gates."""

_BLOCK_BYTES = 8 << 20
"""The workspace for the gates of one layer in one block of steps: on a CPU what its caches hold."""

_LARGE_BLOCK_BYTES = 16 << 20
"""The same for kernels on a GPU, which needs larger products: of the iwslt recipe a step takes 3 to 6 % less time on an
H200 than with half as much, and 36 MB more of 643."""

_PART_BYTES = 4 << 20
"""The workspace for what one step makes of a part of the batch's source positions."""

_ROUND_ROWS = 64
"""Rows of a block of a product are a multiple of this, as its tiles want them."""

_ADDS_IN_FLOAT32 = TorchVersion(torch.__version__) >= "2.10"
"""Whether a product of 16-bit matrices can be added to a float32 one on a GPU."""


def reaches(stash: str, level: str) -> bool:
    """Whether a stash level keeps what ``level`` names."""
    return STASHES.index(stash) >= STASHES.index(level)


def split_blocks(
    steps: int, batch: int, hidden: int, dtype: torch.dtype, large: bool = False
) -> list[tuple[int, int]]:
    """The blocks of steps, (begin, end) each, whose gates, values of ``dtype``, fit the workspace or the ``large`` one.

    The first may be shorter than the others: what precedes its steps lies apart, so that it copies what it reads.
    """
    space = _LARGE_BLOCK_BYTES if large else _BLOCK_BYTES
    size = max(1, space // max(1, batch * 4 * hidden * dtype.itemsize))
    return [(max(0, end - size), end) for end in range(steps, 0, -size)][::-1]


def split_rows(batch: int, positions: int, width: int) -> list[slice]:
    """The parts of a batch whose source positions, ``width`` bytes each, fit the workspace."""
    size = max(1, _PART_BYTES // max(1, positions * width))
    return [slice(begin, begin + size) for begin in range(0, max(1, batch), size)]


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor (..., N), the values of a row one after the other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def previous(sequence: Tensor, first: Tensor, begin: int, end: int) -> Tensor:
    """The entries begin - 1 to end - 1 of a sequence (T, B, H) that ``first`` (B, H) precedes."""
    if begin > 0:
        return sequence[begin - 1 : end - 1]
    return torch.cat([first.unsqueeze(0), sequence[: end - 1]], 0)


def add_outer(total: Tensor, left: Tensor, right: Tensor, fresh: bool = False) -> None:
    """Add left^T right to ``total`` (N, M), in place; left (K, B, N), right (K, B, M).

    The product is made in the type of ``left``, the sum in the type of ``total``, on a GPU in one kernel.

    Args:
        total: see above.
        left, right: see above; they may have more than N and M columns, which then do not count.
        fresh: ``total`` holds no values yet, whatever its memory says.
    """
    left, right = left.reshape(-1, left.shape[2]).t(), right.reshape(-1, right.shape[2])
    if total.dtype != left.dtype and _ADDS_IN_FLOAT32 and device_of(left) == "cuda":
        _add_product(total, left, right, fresh)
        return
    left, right = left[: len(total)], right[:, : total.shape[1]]
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if fresh else 1)
    elif fresh:
        total.copy_(left @ right)
    else:
        total += left @ right


def _add_product(total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """Add left (N, K) times right (K, M) to ``total`` (N, M) on a GPU; of no `even` width by blocks of rows."""
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
        own, part = total[begin : begin + size], left[begin : begin + size]
        if (len(part), right.shape[1]) == own.shape:
            torch.addmm(own, part, right, out_dtype=total.dtype, beta=0 if fresh else 1, out=own)
            continue
        product = torch.mm(part, right, out_dtype=total.dtype)[: len(own), :columns]
        own.copy_(product) if fresh else own.add_(product)
