"""What padding costs: the work of a text's batches over the work of its pairs at their own lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.config.recipe import BatchSize
from econmt.data.batching.batches import BatchIterator, rows_of_batch
from econmt.data.batching.bucket_shapes import Counts, Derived
from econmt.data.batching.buckets import place
from econmt.data.batching.epochs import plan_epoch
from econmt.data.batching.pair_flops import PairFlops
from econmt.data.batching.token_store import IntArray

_SAMPLE = 2000
"""Batches of an epoch that are looked at; they come in random order."""


class Padding(NamedTuple):
    """Batches of one kind."""

    shapes: int
    """Different (source, target) shapes to which they are padded."""
    padded: float
    """Work at these shapes, over that of the pairs at their own lengths."""
    trimmed: float
    """Work once each batch is cut to its own longest source and target, over the same."""
    trimmed_shapes: int
    """Different (source, target) shapes of batches that are cut."""


class PlannedBatch(NamedTuple):
    """The lengths of a batch: source and target positions of its pairs, and the shape to which they are padded."""

    sources: IntArray
    targets: IntArray
    shape: tuple[int, int]


def measure_padding(batches: Iterable[PlannedBatch], work: PairFlops) -> Padding:
    """Add up the work of some batches."""
    real = padded = trimmed = 0
    shapes: set[tuple[int, int]] = set()
    trimmed_shapes: set[tuple[int, int]] = set()
    for sources, targets, shape in batches:
        longest = int(sources.max()), int(targets.max())
        real += int(work.of(sources, targets).sum())
        padded += len(sources) * int(work.of(*shape))
        trimmed += len(sources) * int(work.of(*longest))
        shapes.add(shape)
        trimmed_shapes.add(longest)
    return Padding(len(shapes), padded / real, trimmed / real, len(trimmed_shapes))


def planned(batches: BatchIterator, most: int = _SAMPLE) -> Iterator[PlannedBatch]:
    """Lengths of the batches of an epoch, of at most so many."""
    store = batches.store
    for pairs, shape in islice(batches.plan(), most):
        yield PlannedBatch(store.source_lengths[pairs] + 1, store.target_lengths[pairs] + 1, shape)
    store.release()


def random_batches(
    sources: IntArray, targets: IntArray, batch: BatchSize, most: int = _SAMPLE
) -> Iterator[PlannedBatch]:
    """Batches without buckets: pairs in random order, each batch padded to its longest pair; at most ``most``.

    Args:
        sources, targets: (N,) ids of each side, ``</s>`` not counted. batch: how many pairs.
    """
    order = np.random.default_rng(1).permutation(len(sources))
    first = 0
    for _ in range(most):
        if first == len(order):
            return
        rows = _rows(targets[order[first : first + batch.size]] + 1, batch)
        pairs = order[first : first + rows]
        first += rows
        own = sources[pairs] + 1, targets[pairs] + 1
        yield PlannedBatch(*own, (int(own[0].max()), int(own[1].max())))


def _rows(targets: IntArray, batch: BatchSize) -> int:
    """How many of the first pairs make a batch."""
    if batch.type == "sentence":
        return len(targets)
    positions = np.maximum.accumulate(targets.astype(np.int64)) * np.arange(1, len(targets) + 1)
    return max(1, int((positions <= batch.size).sum()))


def padded_to_buckets(
    counts: Counts, rule: int | Derived, batch: BatchSize, work: PairFlops
) -> tuple[int, float]:
    """How many shapes the batches of a rule have, and their work over that of the pairs; from the lengths alone.

    Args:
        counts: of the pairs, as :func:`econmt.data.batching.buckets.count_lengths` gives them.
        rule: as :func:`econmt.data.batching.buckets.assign_buckets` has it. batch: how many pairs. work: of a pair.
    """
    shapes, buckets = place(counts, rule)
    cells = np.argwhere(counts)
    of_cells = buckets[cells[:, 0], cells[:, 1]]
    in_buckets = np.bincount(of_cells, counts[cells[:, 0], cells[:, 1]], len(shapes)).astype(np.int64)
    rows = [rows_of_batch(batch, target) for target in shapes[:, 1].tolist()]
    table = plan_epoch(shapes, in_buckets, rows, rule)
    padded = (table.rows * work.of(table.shapes[:, 0], table.shapes[:, 1]).astype(np.float64)).sum()
    return len(np.unique(table.shapes, axis=0)), float(padded) / real_work(counts, work)


def real_work(counts: Counts, work: PairFlops) -> float:
    """Work of all pairs at their own lengths."""
    sides: list[npt.NDArray[np.int64]] = [np.arange(size) for size in counts.shape]
    return float((counts * work.of(sides[0][:, None], sides[1][None, :]).astype(np.float64)).sum())
