"""Table of the batches of an epoch: the range of pairs and the shape of each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.bucket_shapes import Derived


class EpochTable(NamedTuple):
    """Batches of an epoch before shuffling, P batches over N pairs in bucket order."""

    starts: npt.NDArray[np.int64]
    """First position of each batch in the order of pairs, (P,); positions from N on index ``remainders``."""
    rows: npt.NDArray[np.int64]
    """Number of pairs in each batch, (P,)."""
    shapes: npt.NDArray[np.int64]
    """Source and target positions of each batch, (P, 2)."""
    remainders: npt.NDArray[np.int64]
    """Positions, in the order of pairs, of batches that are not consecutive pairs, one batch after the other, (R,)."""
    windows: npt.NDArray[np.int64]
    """First position, end and rows per batch of each derived bucket, for :func:`mix`, (W, 3); W = 0 if fixed."""


def plan_epoch(
    shapes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], rows: Sequence[int], rule: int | Derived
) -> EpochTable:
    """Divides buckets into batches.

    Args:
        shapes: shapes of the buckets, (K, 2), sorted by target, then source positions.
        counts: number of pairs in each bucket, (K,).
        rows: rows of a full batch of each bucket, length K.
        rule: bucket rule, which tells derived from fixed buckets.
    """
    divide = _divide_derived if isinstance(rule, Derived) else _divide_fixed
    parts = [np.array(part, dtype=np.int64) for part in divide(shapes.tolist(), counts.tolist(), rows)]
    table = parts[0].reshape(-1, 4)
    return EpochTable(table[:, 0], table[:, 1], table[:, 2:], parts[1], parts[2].reshape(-1, 3))


_Divided = tuple[list[tuple[int, int, int, int]], list[int], list[tuple[int, int, int]]]
"""Start, rows, source and target positions of each batch; remainders; windows, as in :class:`EpochTable`."""


def _divide_derived(buckets: list[list[int]], counts: list[int], sizes: Sequence[int]) -> _Divided:
    """Makes full batches of each bucket; the longest pairs remain and go into the next bucket that has room for them.

    If that is the one that follows, they are its first pairs; else they are ``remainders`` and fill its first batch.
    """
    pairs, first, end = sum(counts), 0, 0
    batches, windows = [], []
    remainders: list[int] = []
    waiting: list[list[int]] = [[] for _ in buckets]
    for number, ((source, target), count) in enumerate(zip(buckets, counts, strict=True)):
        end += count
        full, coming = sizes[number], waiting[number]
        later = range(number + 1, len(buckets))
        next_bucket = next((each for each in later if buckets[each][0] >= source), None)
        while coming and (len(coming) + end - first >= full or next_bucket is None):
            own = max(0, min(full - len(coming), end - first))
            mixed = [*coming[:full], *range(first, first + own)]
            batches.append((pairs + len(remainders), len(mixed), source, target))
            remainders += mixed
            coming, first = coming[full:], first + own
        last = end if next_bucket is None else end - (end - first) % full
        batches += [(start, min(full, last - start), source, target) for start in range(first, last, full)]
        windows.append((first, last, full))
        first = last
        if next_bucket is not None:
            waiting[next_bucket] += coming
            if next_bucket > number + 1:
                waiting[next_bucket] += range(last, end)
                first = end
    return batches, remainders, windows


def _divide_fixed(buckets: list[list[int]], counts: list[int], sizes: Sequence[int]) -> _Divided:
    """Makes full batches of each bucket, and batches of mixed shape from the remainders of all buckets."""
    pairs, first = sum(counts), 0
    batches = []
    remainders: list[int] = []
    mixed_start, mixed_source, mixed_target = 0, 0, 0
    for full, count, (source, target) in zip(sizes, counts, buckets, strict=True):
        in_full_batches = count // full * full
        batches += [(start, full, source, target) for start in range(first, first + in_full_batches, full)]
        for position in range(first + in_full_batches, first + count):
            # Buckets come by rising target length, so the newest pair has the longest target of its batch.
            mixed = len(remainders) - mixed_start
            if mixed >= full:
                batches.append((pairs + mixed_start, mixed, mixed_source, mixed_target))
                mixed_start, mixed_source = len(remainders), 0
            remainders.append(position)
            mixed_source, mixed_target = max(mixed_source, source), target
        first += count
    if len(remainders) > mixed_start:
        batches.append((pairs + mixed_start, len(remainders) - mixed_start, mixed_source, mixed_target))
    return batches, remainders, []


def mix(pairs: npt.NDArray[np.int32], rows: int, draw: np.random.Generator) -> None:
    """Shuffles ``pairs`` (N,), sorted by length, in place within windows of ``rows`` and a random offset."""
    first = min(int(draw.integers(rows)), len(pairs))
    last = len(pairs) - (len(pairs) - first) % rows
    draw.shuffle(pairs[:first])
    windows = pairs[first:last].reshape(-1, rows)
    draw.permuted(windows, axis=1, out=windows)
    draw.shuffle(pairs[last:])
