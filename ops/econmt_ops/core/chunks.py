"""Blocks of steps and rows whose recomputed intermediate results fit a workspace of fixed size.

Shapes: T steps, K steps of a block, B batch; time comes first: (T, B, .).
"""

from __future__ import annotations

import torch
from torch import Tensor

STASHES = ("least", "outputs", "attention", "cells", "gates")
"""Levels of what a forward pass keeps, each beside the levels before it: the outputs (every h, and c once a block), in
small blocks or in usual ones; the attention weights; every c; the gates."""

_BLOCK_BYTES = 8 << 20
"""Bytes of the gates of one layer in one block of steps, chosen for the caches of a CPU."""

_LARGE_BLOCK_BYTES = 16 << 20
"""Bytes of such a block for kernels on a GPU, which needs larger products: on an H100 a training step of the iwslt
recipe takes 4 % less time than with half as much, for 30 MB more of 639. Wide layers have at least as many as the
gradients of their two matrices, which every block reads and writes."""

_EVENNESS = 8
"""Inverse of the share of a block by which the first one is shorter, about the memory of what it copies."""

_LEAST_DIVISOR = 2
"""Divisor of these bytes if the least is kept."""

_PART_BYTES = 4 << 20
"""Bytes of the intermediate results of one step for some source positions."""


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
    space = max(_LARGE_BLOCK_BYTES, 8 * hidden**2 * dtype.itemsize) if large else _BLOCK_BYTES
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
