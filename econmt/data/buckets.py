"""Buckets: pairs of like shape, so that batches hold little padding and few different shapes.

A pair's bucket is its (source, target) shape with ``</s>`` counted and each side rounded up to a multiple of
the bucket width. Pairs are put in the order of their buckets by a counting sort in chunks: 10 million pairs
need 40 MB for the order and little else, where one ``argsort`` over all would need several times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.token_store import IntArray

_CHUNK = 1 << 18


class BucketRow(NamedTuple):
    """All buckets of one target length, for reports."""

    target: int
    """Target positions, ``</s>`` counted."""
    smallest_source: int
    largest_source: int
    """Source positions of the narrowest and the widest bucket."""
    pairs: int
    tokens: int
    """Source and target tokens, ``</s>`` counted."""
    padded: int
    """Source and target positions that are computed."""


class Buckets(NamedTuple):
    """All buckets of a store."""

    shapes: npt.NDArray[np.int64]
    """(K, 2): source and target positions of each bucket, ``</s>`` counted; sorted by target, then source."""
    counts: npt.NDArray[np.int64]
    """(K,): number of pairs in each."""
    order: npt.NDArray[np.int32]
    """(N,): indices of the pairs, bucket after bucket, inside a bucket in the order of the store."""

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """(K,): where each bucket begins in ``order``."""
        return np.cumsum(self.counts) - self.counts


def round_up(values: IntArray, width: int) -> npt.NDArray[np.int64]:
    """``values`` rounded up to multiples of ``width``."""
    return (values.astype(np.int64) + (width - 1)) // width * width


def assign_buckets(
    source_lengths: IntArray,
    target_lengths: IntArray,
    width: int,
    capacity: IntArray | None = None,
    release: Callable[[], None] | None = None,
) -> Buckets:
    """Sort pairs into buckets.

    Args:
        source_lengths: (N,) ids of each source side, ``</s>`` not counted.
        target_lengths: (N,) the same of the target side.
        width: lengths, ``</s>`` counted, are rounded up to multiples of this.
        release: called after each chunk, to give mapped memory pages back.
        capacity: (longest + 1,) the length to make room for instead of each length; None: the length itself.
    """
    pairs = len(source_lengths)
    assert pairs == len(target_lengths)
    assert pairs < 1 << 31
    assert width >= 1

    def keys_of(chunk: slice) -> npt.NDArray[np.int64]:
        source, target = source_lengths[chunk], target_lengths[chunk]
        if capacity is not None:
            source, target = capacity[source], capacity[target]
        return _keys(source, target, width)

    chunks = [slice(first, min(first + _CHUNK, pairs)) for first in range(0, pairs, _CHUNK)]
    found: dict[int, int] = {}
    for chunk in chunks:
        keys, counts = np.unique(keys_of(chunk), return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            found[key] = found.get(key, 0) + count
        if release is not None:
            release()
    keys = np.array(sorted(found), dtype=np.int64)
    counts = np.array([found[key] for key in keys.tolist()], dtype=np.int64)
    order = np.empty(pairs, dtype=np.int32)
    free = np.cumsum(counts) - counts
    small: np.dtype[Any] = np.dtype(np.uint16 if len(keys) <= 1 << 16 else np.int32)
    for chunk in chunks:
        buckets = np.searchsorted(keys, keys_of(chunk)).astype(small)
        by_bucket = np.argsort(buckets, kind="stable")  # a radix sort for 16-bit keys
        here = np.bincount(buckets, minlength=len(keys))
        rank = np.arange(len(buckets)) - np.repeat(np.cumsum(here) - here, here)
        order[free[buckets[by_bucket]] + rank] = by_bucket + chunk.start
        free += here
        if release is not None:
            release()
    shapes = np.stack([keys & 0xFFFFFFFF, keys >> 32], axis=1) * width
    return Buckets(shapes, counts, order)


def _keys(source_lengths: IntArray, target_lengths: IntArray, width: int) -> npt.NDArray[np.int64]:
    source = (source_lengths.astype(np.int64) + width) // width
    target = (target_lengths.astype(np.int64) + width) // width
    return (target << 32) | source


def bucket_table(source_lengths: IntArray, target_lengths: IntArray, width: int) -> list[BucketRow]:
    """How much of the padded positions is real text, by target length.

    Args:
        source_lengths: (N,) ids of each source side, ``</s>`` not counted.
        target_lengths: (N,) the same of the target side.
        width: bucket width.
    """
    buckets = assign_buckets(source_lengths, target_lengths, width)
    rows: list[BucketRow] = []
    for target in np.unique(buckets.shapes[:, 1]).tolist():
        chosen = np.flatnonzero(buckets.shapes[:, 1] == target)
        shapes, counts = buckets.shapes[chosen], buckets.counts[chosen]
        first = int(buckets.starts[chosen[0]])
        tokens = 0
        for start in range(first, first + int(counts.sum()), _CHUNK):
            pairs = buckets.order[start : min(start + _CHUNK, first + int(counts.sum()))]
            tokens += int(source_lengths[pairs].sum()) + int(target_lengths[pairs].sum()) + 2 * len(pairs)
        padded = int((shapes.sum(axis=1) * counts).sum())
        sources = shapes[:, 0]
        rows.append(
            BucketRow(target, int(sources.min()), int(sources.max()), int(counts.sum()), tokens, padded)
        )
    return rows
