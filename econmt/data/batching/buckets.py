"""Buckets: groups of pairs of similar lengths, so that batches have little padding and few different shapes.

Fixed buckets round each side, including ``</s>``, up to a multiple of a width. Derived buckets are the few shapes that
:mod:`econmt.data.batching.bucket_shapes` computes from the lengths of a text. Pairs are sorted by bucket with a
counting sort in blocks, which needs 40 MB for 10 million pairs; one ``argsort`` would need several times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.bucket_shapes import Counts, Derived, choose, derive_shapes, grid_shapes
from econmt.data.batching.token_store import IntArray

_BLOCK = 1 << 18


class BucketRow(NamedTuple):
    """Statistics of one derived bucket, or of all fixed buckets of one target length, for reports."""

    target: int
    """Target positions, including ``</s>``."""
    smallest_source: int
    largest_source: int
    """Source positions of the narrowest and the widest bucket."""
    pairs: int
    tokens: int
    """Source and target tokens, including ``</s>``."""
    padded: int
    """Source and target positions after padding, over all pairs."""


class Buckets(NamedTuple):
    """Assignment of all pairs of a store to buckets."""

    shapes: npt.NDArray[np.int64]
    """Source and target positions of each bucket, including ``</s>``, (K, 2); sorted by target, then source."""
    counts: npt.NDArray[np.int64]
    """Number of pairs in each bucket, (K,)."""
    order: npt.NDArray[np.int32]
    """Indices of the pairs, sorted by bucket, inside a bucket by similar lengths, (N,)."""
    alike: npt.NDArray[np.int64]
    """Sizes of the groups in ``order`` that are shuffled freely: pairs of equal lengths, or fixed buckets, (C,)."""


def round_up(values: IntArray, width: int) -> npt.NDArray[np.int64]:
    """Rounds an array up to multiples of ``width``."""
    return (values.astype(np.int64) + (width - 1)) // width * width


def count_lengths(
    source_lengths: IntArray,
    target_lengths: IntArray,
    capacity: IntArray | None = None,
    release: Callable[[], None] | None = None,
) -> Counts:
    """Counts the pairs of each pair of lengths, in blocks.

    Args:
        source_lengths, target_lengths: number of ids of each side without ``</s>``, (N,).
        capacity: length to reserve for each length, (longest + 1,); None: the length itself.
        release: called after each block to release mapped memory pages.
    """
    counts = np.zeros((1, 1), dtype=np.int64)
    for first in range(0, len(source_lengths), _BLOCK):
        source, target = source_lengths[first : first + _BLOCK], target_lengths[first : first + _BLOCK]
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
    """Assigns pairs to buckets.

    Args:
        source_lengths, target_lengths, capacity, release: see :func:`count_lengths`.
        rule: width to whose multiples lengths, including ``</s>``, are rounded up; or the rule that derives shapes.
        shapes: existing derived shapes that hold all pairs, (K, 2); None: derive them.
    """
    assert len(source_lengths) == len(target_lengths) < 1 << 31
    counts = count_lengths(source_lengths, target_lengths, capacity, release)
    if shapes is None:
        shapes, buckets = assign_lengths(counts, rule)
    else:
        assert isinstance(rule, Derived)
        buckets = choose(counts.shape, shapes, rule.work)
    cells = _sorted_cells(np.argwhere(counts), buckets, rule)
    cell_buckets, cell_counts = buckets[cells[:, 0], cells[:, 1]], counts[cells[:, 0], cells[:, 1]]
    bucket_counts = np.bincount(cell_buckets, cell_counts, len(shapes)).astype(np.int64)
    if isinstance(rule, Derived):
        alike, ranks = cell_counts, np.arange(len(cells), dtype=np.int32)
    else:
        alike, ranks = bucket_counts, cell_buckets
    rank_of = np.zeros(counts.shape, dtype=np.uint16 if len(alike) <= 1 << 16 else np.int32)
    rank_of[cells[:, 0], cells[:, 1]] = ranks

    def ranks_of(block: slice) -> npt.NDArray[Any]:
        source, target = source_lengths[block], target_lengths[block]
        if capacity is not None:
            source, target = capacity[source], capacity[target]
        block_ranks: npt.NDArray[Any] = rank_of[source + 1, target + 1]
        return block_ranks

    order = _counting_sort(len(source_lengths), alike, ranks_of, release)
    return Buckets(shapes, bucket_counts, order, alike)


def assign_lengths(
    counts: Counts, rule: int | Derived
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Returns the shapes of a rule, (K, 2), and the shape's row index for every pair of lengths in ``counts``."""
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


def _sorted_cells(cells: IntArray, buckets: npt.NDArray[np.int32], rule: int | Derived) -> IntArray:
    """Sorts pairs of lengths by bucket."""
    sources, targets = cells[:, 0], cells[:, 1]
    keys: list[IntArray] = [buckets[sources, targets]]
    if isinstance(rule, Derived):
        # Boustrophedon order: source lengths rise for one target length and fall for the next: neighbours are similar.
        keys = [np.where(targets % 2 == 0, sources, -sources), targets, *keys]
    return cells[np.lexsort(keys)]


def _counting_sort(
    pairs: int,
    counts: npt.NDArray[np.int64],
    ranks_of: Callable[[slice], npt.NDArray[Any]],
    release: Callable[[], None] | None,
) -> npt.NDArray[np.int32]:
    """Returns the indices of pairs sorted by rank, stable, given the number of pairs of each rank."""
    order = np.empty(pairs, dtype=np.int32)
    next_slot = np.cumsum(counts) - counts
    for first in range(0, pairs, _BLOCK):
        ranks = ranks_of(slice(first, min(first + _BLOCK, pairs)))
        by_rank = np.argsort(ranks, kind="stable")  # a radix sort for 16-bit ranks
        block_counts = np.bincount(ranks, minlength=len(counts))
        within = np.arange(len(ranks)) - np.repeat(np.cumsum(block_counts) - block_counts, block_counts)
        order[next_slot[ranks[by_rank]] + within] = by_rank + first
        next_slot += block_counts
        if release is not None:
            release()
    return order


def bucket_table(counts: Counts, rule: int | Derived) -> list[BucketRow]:
    """Returns statistics for each derived bucket, or for each target length of fixed buckets."""
    shapes, buckets = assign_lengths(counts, rule)
    cells = np.argwhere(counts)
    pairs = counts[cells[:, 0], cells[:, 1]]
    cell_buckets = buckets[cells[:, 0], cells[:, 1]]
    rows: list[BucketRow] = []
    groups = list(np.arange(len(shapes))[:, None])
    if not isinstance(rule, Derived):
        groups = [np.flatnonzero(shapes[:, 1] == target) for target in np.unique(shapes[:, 1])]
    for group in groups:
        inside = np.isin(cell_buckets, group)
        inside_counts, sources = pairs[inside], shapes[group, 0]
        tokens = (cells[inside].sum(axis=1) * inside_counts).sum()
        padded = (shapes[cell_buckets[inside]].sum(axis=1) * inside_counts).sum()
        figures = (shapes[group[0], 1], sources.min(), sources.max(), inside_counts.sum(), tokens, padded)
        rows.append(BucketRow(*map(int, figures)))
    return rows
