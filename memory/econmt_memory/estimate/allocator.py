"""Simulation of PyTorch's CUDA caching allocator with its default settings, and what cuBLAS takes from it.

Sizes are multiples of 512 bytes. Requests up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments
of 20 MiB, and larger ones get their own segment, a multiple of 2 MiB. An allocation takes the smallest free block that
is large enough; the rest is split off unless it is small. Free neighbours are merged. Segments are never freed.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Hashable

from econmt_memory.measure.storages import BLOCK

_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_OWN_SEGMENT = 10 << 20
_ROUNDING = 2 << 20

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable with the size of cuBLAS's workspace, as cuBLAS reads it."""

_CUBLAS_WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace by default on a GPU of compute capability 9.0; PyTorch gives it 8.1 MiB on others.

Each thread has a lasting one, that of backward passes, too (ATen/cuda/CublasHandlePool.cpp); a graph frees the first.
"""


def round_up(size: int, multiple: int) -> int:
    """Rounds a size up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


def cublas_workspace(unset: str = "") -> int:
    """Returns the bytes of the workspace for a thread; ``unset``: configuration if the variable is not set."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get(CUBLAS_VARIABLE, unset))
    return sum(int(kibibytes) * int(count) for kibibytes, count in sizes) << 10 or _CUBLAS_WORKSPACE


def cublas_workspaces() -> set[int]:
    """Returns the sizes of workspaces on GPUs of compute capability 9.0 and on others."""
    return {cublas_workspace(), cublas_workspace(":4096:2:16:8")}


_Pool = list[tuple[int, int]]
"""Free blocks, as (size, address) in ascending order."""


class CachingAllocator:
    """Allocator of one device; a block is freed into the pool from which it came.

    Attributes:
        allocated, reserved: Bytes of used blocks, and of segments.
        peak_allocated, peak_reserved: Their peaks.
    """

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self._used: dict[int, tuple[int, _Pool]] = {}
        self._held: dict[Hashable, tuple[int, int]] = {}
        # Ends of free blocks by their beginnings, and the reverse.
        self._ends: dict[int, int] = {}
        self._begins: dict[int, int] = {}
        self._next = 0
        self.begin_pools()

    def begin_pools(self) -> None:
        """Makes further allocations come from new segments, as those of another stream or of a CUDA graph do."""
        self._pools: dict[bool, _Pool] = {True: [], False: []}

    def allocate(self, size: int) -> int:
        """Allocates ``size`` > 0 bytes; returns their address."""
        size = round_up(size, BLOCK)
        is_small = size <= _SMALL
        pool = self._pools[is_small]
        index = bisect_left(pool, (size, -1))
        if index < len(pool):
            length, begin = pool[index]
            self._take(pool, begin)
        else:
            large = _LARGE_SEGMENT if size < _OWN_SEGMENT else round_up(size, _ROUNDING)
            length, begin = _SMALL_SEGMENT if is_small else large, self._next
            # A gap between segments, so that their blocks are not merged.
            self._next += length + BLOCK
            self.reserved += length
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        rest = length - size
        if rest >= BLOCK if is_small else rest > _SMALL:
            self._put(pool, begin + size, begin + length)
            length = size
        self._used[begin] = begin + length, pool
        self.allocated += length
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return begin

    def hold(self, key: Hashable, size: int) -> int:
        """Replaces the block of a key by one of ``size`` bytes, or by none; returns its bytes, which may be more."""
        requested, begin = self._held.pop(key, (0, 0))
        if size:
            self._held[key] = size, begin if size == requested else self.allocate(size)
        if requested not in (0, size):
            self.free(begin)
        return self._used[self._held[key][1]][0] - self._held[key][1] if size else 0

    def free(self, begin: int) -> None:
        """Frees the bytes that :meth:`allocate` has allocated at an address."""
        end, pool = self._used.pop(begin)
        self.allocated -= end - begin
        if begin in self._begins:
            begin = self._begins[begin]
            self._take(pool, begin)
        if end in self._ends:
            end = self._take(pool, end)
        self._put(pool, begin, end)

    def _put(self, pool: _Pool, begin: int, end: int) -> None:
        insort(pool, (end - begin, begin))
        self._ends[begin], self._begins[end] = end, begin

    def _take(self, pool: _Pool, begin: int) -> int:
        """Takes a free block from its pool and returns its end."""
        end = self._ends.pop(begin)
        del self._begins[end], pool[bisect_left(pool, (end - begin, begin))]
        return end
