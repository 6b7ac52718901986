"""Buckets: pairs of like shape, so that batches hold little padding and few different shapes.

There are two rules. Fixed buckets round each side, ``</s>`` counted, up to a multiple of a width. Derived buckets are
the few shapes that :mod:`econmt.data.batching.bucket_shapes` finds for the lengths of a text. Pairs are put in the order of
their buckets by a counting sort in chunks: 10 million pairs need 40 MB for the order and little else, where one
``argsort`` over all would need several times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.bucket_shapes import Counts, Derived, choose, derive_shapes, grid_shapes
from econmt.data.batching.token_store import IntArray

_CHUNK = 1 << 18


class BucketRow(NamedTuple):
    """One derived bucket, or all fixed ones of one target length, for reports."""

    target: int
    """Target positions, ``</s>`` counted."""
    smallest_source: int
    largest_source: int
    """Source positions of the narrowest and the widest bucket."""
    pairs: int
    tokens: int
    """Source and target tokens, ``</s>`` counted."""
    padded: int
    """Source and target positions of the bucket's shape."""


class Buckets(NamedTuple):
    """All buckets of a store."""

    shapes: npt.NDArray[np.int64]
    """(K, 2): source and target positions of each bucket, ``</s>`` counted; sorted by target, then source."""
    counts: npt.NDArray[np.int64]
    """(K,): number of pairs in each."""
    order: npt.NDArray[np.int32]
    """(N,): indices of the pairs, bucket after bucket, inside a bucket those of like lengths beside each other."""
    alike: npt.NDArray[np.int64]
    """(C,): how many neighbours in ``order`` count as being of the same lengths: of each fixed bucket, all."""

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """(K,): where each bucket begins in ``order``."""
        return np.cumsum(self.counts) - self.counts


def round_up(values: IntArray, width: int) -> npt.NDArray[np.int64]:
    """``values``, of any shape, rounded up to multiples of ``width``."""
    return (values.astype(np.int64) + (width - 1)) // width * width


def count_lengths(
    source_lengths: IntArray,
    target_lengths: IntArray,
    capacity: IntArray | None = None,
    release: Callable[[], None] | None = None,
) -> Counts:
    """Count the pairs of each shape, in chunks.

    Args:
        source_lengths, target_lengths: (N,) ids of each side, ``</s>`` not counted.
        capacity: (longest + 1,) the length to make room for instead of each length; None: the length itself.
        release: called after each chunk, to give mapped memory pages back.
    """
    counts = np.zeros((1, 1), dtype=np.int64)
    for first in range(0, len(source_lengths), _CHUNK):
        source, target = source_lengths[first : first + _CHUNK], target_lengths[first : first + _CHUNK]
        if capacity is not None:
            source, target = capacity[source], capacity[target]
        rows = max(counts.shape[0], int(source.max()) + 2)
        columns = max(counts.shape[1], int(target.max()) + 2)
        grown = np.zeros((rows, columns), dtype=np.int64)
        grown[: counts.shape[0], : counts.shape[1]] = counts
        cells = (source.astype(np.int64) + 1) * columns + target + 1
        counts = grown + np.bincount(cells, minlength=rows * columns).reshape(rows, columns)
        if release is not None:
            release()
    return counts


def assign_buckets(
    source_lengths: IntArray,
    target_lengths: IntArray,
    rule: int | Derived,
    capacity: IntArray | None = None,
    release: Callable[[], None] | None = None,
    shapes: npt.NDArray[np.int64] | None = None,
) -> Buckets:
    """Sort pairs into buckets.

    Args:
        source_lengths, target_lengths, capacity, release: see :func:`count_lengths`.
        rule: a width, of which lengths, ``</s>`` counted, are rounded up to multiples; or how shapes are derived.
        shapes: (K, 2) of derived buckets that are there already, each pair in one of them.
    """
    assert len(source_lengths) == len(target_lengths) < 1 << 31
    counts = count_lengths(source_lengths, target_lengths, capacity, release)
    if shapes is None:
        shapes, buckets = place(counts, rule)
    else:
        assert isinstance(rule, Derived)
        buckets = choose(counts.shape, shapes, rule.work)
    cells = np.argwhere(counts)
    by_bucket = np.lexsort(_sort_keys(cells, buckets, rule))
    cells = cells[by_bucket]
    of_cells, in_cells = buckets[cells[:, 0], cells[:, 1]], counts[cells[:, 0], cells[:, 1]]
    in_buckets = np.bincount(of_cells, in_cells, len(shapes)).astype(np.int64)
    if isinstance(rule, Derived):
        alike, ranks = in_cells, np.arange(len(cells), dtype=np.int32)
    else:
        alike, ranks = in_buckets, of_cells
    rank_of = np.zeros(counts.shape, dtype=np.uint16 if len(alike) <= 1 << 16 else np.int32)
    rank_of[cells[:, 0], cells[:, 1]] = ranks

    def ranks_of(chunk: slice) -> npt.NDArray[Any]:
        source, target = source_lengths[chunk], target_lengths[chunk]
        if capacity is not None:
            source, target = capacity[source], capacity[target]
        found: npt.NDArray[Any] = rank_of[source + 1, target + 1]
        return found

    order = _counting_sort(len(source_lengths), alike, ranks_of, release)
    return Buckets(shapes, in_buckets, order, alike)


def place(counts: Counts, rule: int | Derived) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The shapes of a rule, (K, 2), and for every pair of lengths, as ``counts`` has them, its shape's row."""
    if isinstance(rule, Derived):
        shapes = derive_shapes(counts, rule) if counts.any() else np.zeros((0, 2), dtype=np.int64)
        return shapes, choose(counts.shape, shapes, rule.work)
    shapes = grid_shapes(counts, rule)
    source, target = (round_up(np.arange(size), rule) for size in counts.shape)
    known = {shape: row for row, shape in enumerate(map(tuple, shapes.tolist()))}
    buckets = np.full(counts.shape, -1, dtype=np.int32)
    for s, t in np.argwhere(counts).tolist():
        buckets[s, t] = known[int(source[s]), int(target[t])]
    return shapes, buckets


def _sort_keys(
    cells: npt.NDArray[Any], buckets: npt.NDArray[np.int32], rule: int | Derived
) -> tuple[npt.NDArray[Any], ...]:
    """Keys of ``np.lexsort`` that put pairs of lengths in the order of their buckets, the last key first."""
    sources, targets = cells[:, 0], cells[:, 1]
    of_cells = buckets[sources, targets]
    if not isinstance(rule, Derived):
        return (of_cells,)
    # Along the source lengths of one target length, back along those of the next: neighbours stay alike.
    return np.where(targets % 2 == 0, sources, -sources), targets, of_cells


def _counting_sort(
    pairs: int,
    counts: npt.NDArray[np.int64],
    ranks_of: Callable[[slice], npt.NDArray[Any]],
    release: Callable[[], None] | None,
) -> npt.NDArray[np.int32]:
    """Indices of pairs by rising rank, those of one rank in the order of the store; ``counts`` pairs a rank."""
    order = np.empty(pairs, dtype=np.int32)
    free = np.cumsum(counts) - counts
    for first in range(0, pairs, _CHUNK):
        ranks = ranks_of(slice(first, min(first + _CHUNK, pairs)))
        by_rank = np.argsort(ranks, kind="stable")  # a radix sort for 16-bit ranks
        here = np.bincount(ranks, minlength=len(counts))
        within = np.arange(len(ranks)) - np.repeat(np.cumsum(here) - here, here)
        order[free[ranks[by_rank]] + within] = by_rank + first
        free += here
        if release is not None:
            release()
    return order


def bucket_table(counts: Counts, rule: int | Derived) -> list[BucketRow]:
    """How much of the positions of buckets is real text: a row a derived bucket, or a target length of fixed ones.

    Args:
        counts: of the pairs, as :func:`count_lengths` gives them.
        rule: as in :func:`assign_buckets`.
    """
    shapes, buckets = place(counts, rule)
    cells = np.argwhere(counts)
    pairs = counts[cells[:, 0], cells[:, 1]]
    of_cells = buckets[cells[:, 0], cells[:, 1]]
    rows: list[BucketRow] = []
    for group in _groups(shapes, rule):
        inside = np.isin(of_cells, group)
        held, sources = pairs[inside], shapes[group, 0]
        tokens = (cells[inside].sum(axis=1) * held).sum()
        padded = (shapes[of_cells[inside]].sum(axis=1) * held).sum()
        figures = (shapes[group[0], 1], sources.min(), sources.max(), held.sum(), tokens, padded)
        rows.append(BucketRow(*map(int, figures)))
    return rows


def _groups(shapes: npt.NDArray[np.int64], rule: int | Derived) -> list[npt.NDArray[np.int64]]:
    if isinstance(rule, Derived):
        return list(np.arange(len(shapes))[:, None])
    return [np.flatnonzero(shapes[:, 1] == target) for target in np.unique(shapes[:, 1]).tolist()]
