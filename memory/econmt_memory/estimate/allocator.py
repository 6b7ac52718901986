"""Simulation of PyTorch's CUDA caching allocator with its default settings.

Sizes are multiples of 512 bytes. Requests up to 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments
of 20 MiB, and larger ones get their own segment, a multiple of 2 MiB. An allocation takes the smallest free block that
is large enough; the rest is split off unless it is small. Free neighbours are merged. Segments are never freed.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from econmt_memory.measure.storages import BLOCK

_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_OWN_SEGMENT = 10 << 20
_ROUNDING = 2 << 20


def round_up(size: int, multiple: int) -> int:
    """Rounds a size up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


class _Pool:
    """Free blocks of one pool, as (size, address) in ascending order."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int]] = []
        self.ends: dict[int, int] = {}
        """Beginnings of the free blocks by their ends."""
        self.begins: dict[int, int] = {}
        """Ends of the free blocks by their beginnings."""

    def put(self, begin: int, end: int) -> None:
        insort(self.free, (end - begin, begin))
        self.begins[begin], self.ends[end] = end, begin

    def take(self, begin: int, end: int) -> None:
        del self.free[bisect_left(self.free, (end - begin, begin))]
        del self.begins[begin], self.ends[end]

    def segment(self, size: int) -> int:
        """Returns the bytes of a new segment for a request."""
        if self.small:
            return _SMALL_SEGMENT
        return _LARGE_SEGMENT if size < _OWN_SEGMENT else round_up(size, _ROUNDING)

    def splits(self, rest: int) -> bool:
        """Returns True if the rest of a block is split off."""
        return rest >= BLOCK if self.small else rest > _SMALL


class CachingAllocator:
    """Allocator of one device; a block is freed into the pools from which it came.

    Attributes:
        allocated, reserved: Bytes of used blocks, and of segments.
        peak_allocated, peak_reserved: Their peaks.
    """

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self._used: dict[int, tuple[int, _Pool]] = {}
        self._next = 0
        self.begin_pools()

    def begin_pools(self) -> None:
        """Makes further allocations come from new segments, as those of another stream or of a CUDA graph do."""
        self._pools = {small: _Pool(small) for small in (True, False)}

    def allocate(self, size: int) -> int:
        """Allocates ``size`` > 0 bytes; returns their address."""
        size = round_up(size, BLOCK)
        pool = self._pools[size <= _SMALL]
        index = bisect_left(pool.free, (size, -1))
        if index < len(pool.free):
            length, begin = pool.free[index]
            pool.take(begin, begin + length)
        else:
            length, begin = pool.segment(size), self._next
            # A gap between segments, so that their blocks are not merged.
            self._next += length + BLOCK
            self.reserved += length
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        end = begin + length
        if pool.splits(length - size):
            pool.put(begin + size, end)
            end = begin + size
        self._used[begin] = end, pool
        self.allocated += end - begin
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return begin

    def size_of(self, begin: int) -> int:
        """Returns the bytes of the block at an address, which may be larger than what was requested."""
        return self._used[begin][0] - begin

    def free(self, begin: int) -> None:
        """Frees the bytes that :meth:`allocate` has allocated at an address."""
        end, pool = self._used.pop(begin)
        self.allocated -= end - begin
        if begin in pool.ends:
            before = pool.ends[begin]
            pool.take(before, begin)
            begin = before
        if end in pool.begins:
            after = pool.begins[end]
            pool.take(end, after)
            end = after
        pool.put(begin, end)
