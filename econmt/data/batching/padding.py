"""Cost of padding: work of the padded batches of a text relative to that of its pairs without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.config.recipe import BatchSize
from econmt.data.batching.batches import BatchIterator, rows_of_batch
from econmt.data.batching.bucket_shapes import Counts, Derived
from econmt.data.batching.buckets import assign_lengths
from econmt.data.batching.epochs import plan_epoch
from econmt.data.batching.pair_flops import PairFlops
from econmt.data.batching.token_store import IntArray

_SAMPLE = 2000
"""Number of batches of an epoch to measure; they are in random order."""


class Padding(NamedTuple):
    """Padding cost of a set of batches."""

    shapes: int
    """Number of distinct padded (source, target) shapes."""
    padded: float
    """Work at the padded shapes relative to that without padding."""
    trimmed: float
    """Work with each batch trimmed to its longest source and target, relative to that without padding."""


class PlannedBatch(NamedTuple):
    """Lengths of a batch: source and target positions of its pairs, and the padded shape."""

    sources: IntArray
    targets: IntArray
    shape: tuple[int, int]


def measure_padding(batches: Iterable[PlannedBatch], work: PairFlops) -> Padding:
    """Measures the padding cost of batches."""
    real = padded = trimmed = 0
    shapes: set[tuple[int, int]] = set()
    for sources, targets, shape in batches:
        longest = int(sources.max()), int(targets.max())
        real += int(work.of(sources, targets).sum())
        padded += len(sources) * int(work.of(*shape))
        trimmed += len(sources) * int(work.of(*longest))
        shapes.add(shape)
    return Padding(len(shapes), padded / real, trimmed / real)


def planned(batches: BatchIterator) -> Iterator[PlannedBatch]:
    """Yields the lengths of the batches of an epoch, at most :data:`_SAMPLE`."""
    store = batches.store
    for pairs, shape in islice(batches.plan(), _SAMPLE):
        yield PlannedBatch(store.source_lengths[pairs] + 1, store.target_lengths[pairs] + 1, shape)
    store.release()


def random_batches(sources: IntArray, targets: IntArray, batch: BatchSize) -> Iterator[PlannedBatch]:
    """Yields some batches without buckets: pairs in random order, padded to the longest of a batch.

    The lengths of both sides, (N,), do not count ``</s>``.
    """
    order = np.random.default_rng(1).permutation(len(sources))
    for _ in range(_SAMPLE):
        if not len(order):
            return
        rows = _rows(targets[order[: batch.size]] + 1, batch)
        pairs, order = order[:rows], order[rows:]
        lengths = sources[pairs] + 1, targets[pairs] + 1
        yield PlannedBatch(*lengths, (int(lengths[0].max()), int(lengths[1].max())))


def _rows(targets: IntArray, batch: BatchSize) -> int:
    """Returns the number of leading pairs that make a batch."""
    if batch.type == "sentence":
        return len(targets)
    positions = np.maximum.accumulate(targets.astype(np.int64)) * np.arange(1, len(targets) + 1)
    return max(1, int((positions <= batch.size).sum()))


def padded_to_buckets(
    counts: Counts, rule: int | Derived, batch: BatchSize, work: PairFlops
) -> tuple[int, float]:
    """Returns the number of shapes of a bucket rule, and the padded work relative to that without padding."""
    shapes, buckets = assign_lengths(counts, rule)
    cells = np.argwhere(counts)
    cell_buckets = buckets[cells[:, 0], cells[:, 1]]
    bucket_counts = np.bincount(cell_buckets, counts[cells[:, 0], cells[:, 1]], len(shapes)).astype(np.int64)
    rows = [rows_of_batch(batch, target) for target in shapes[:, 1].tolist()]
    table = plan_epoch(shapes, bucket_counts, rows, rule)
    padded = (table.rows * work.of(table.shapes[:, 0], table.shapes[:, 1]).astype(np.float64)).sum()
    return len(np.unique(table.shapes, axis=0)), float(padded) / real_work(counts, work)


def real_work(counts: Counts, work: PairFlops) -> float:
    """Returns the work of all pairs without padding."""
    sides: list[npt.NDArray[np.int64]] = [np.arange(size) for size in counts.shape]
    return float((counts * work.of(sides[0][:, None], sides[1][None, :]).astype(np.float64)).sum())
