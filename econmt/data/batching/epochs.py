"""The batches of an epoch, as a table: which places in the order of pairs each one has, and its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.bucket_shapes import Derived


class EpochTable(NamedTuple):
    """The batches of an epoch, before shuffling. P batches."""

    starts: npt.NDArray[np.int64]
    """(P,): first place of each batch in the order of pairs; places from N on are in the list of remainders."""
    rows: npt.NDArray[np.int64]
    """(P,): pairs in each batch."""
    shapes: npt.NDArray[np.int64]
    """(P, 2): source and target positions of each batch."""
    remainders: npt.NDArray[np.int64]
    """(R,): places, in the order of pairs, of those that do not fill a batch of their fixed bucket."""
    windows: npt.NDArray[np.int64]
    """(W, 3): first place, end and rows a batch of each derived bucket, within which pairs are mixed; none if fixed."""


def plan_epoch(
    shapes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], rows: Sequence[int], rule: int | Derived
) -> EpochTable:
    """Divide buckets into batches.

    Args:
        shapes: (K, 2) of the buckets, by rising target, then source positions.
        counts: (K,) pairs in each.
        rows: K, of a full batch of each.
        rule: whether they are fixed or derived.
    """
    divide = _divide_derived if isinstance(rule, Derived) else _divide_fixed
    batches, remainders, windows = divide(shapes.tolist(), counts.tolist(), rows)
    table = np.array(batches, dtype=np.int64).reshape(-1, 4)
    return EpochTable(
        table[:, 0],
        table[:, 1],
        table[:, 2:],
        np.array(remainders, dtype=np.int64),
        np.array(windows, dtype=np.int64).reshape(-1, 3),
    )


_Divided = tuple[list[tuple[int, int, int, int]], list[int], list[tuple[int, int, int]]]
"""Start, rows, source and target positions of each batch; remainders; windows."""


def _divide_derived(buckets: list[list[int]], counts: list[int], sizes: Sequence[int]) -> _Divided:
    """Full batches of each bucket; the longest pairs, which do not fill one, go into the next bucket if it has room."""
    batches = []
    windows = []
    first = end = 0
    for number, ((source, target), count) in enumerate(zip(buckets, counts, strict=True)):
        end += count
        full = sizes[number]
        larger = number + 1 < len(buckets) and buckets[number + 1][0] >= source
        last = end - (end - first) % full if larger else end
        batches += [(start, min(full, last - start), source, target) for start in range(first, last, full)]
        windows.append((first, last, full))
        first = last
    return batches, [], windows


def _divide_fixed(buckets: list[list[int]], counts: list[int], sizes: Sequence[int]) -> _Divided:
    """Full batches of each bucket, and the remainders of all buckets in batches of mixed shape."""
    pairs, first = sum(counts), 0
    batches = []
    remainders: list[int] = []
    mixed_start, mixed_source, mixed_target = 0, 0, 0
    for full, count, (source, target) in zip(sizes, counts, buckets, strict=True):
        whole = count // full * full
        batches += [(start, full, source, target) for start in range(first, first + whole, full)]
        for place in range(first + whole, first + count):
            # Buckets come by rising target length, so the newest pair has the longest target of its batch.
            mixed = len(remainders) - mixed_start
            if mixed >= full:
                batches.append((pairs + mixed_start, mixed, mixed_source, mixed_target))
                mixed_start, mixed_source = len(remainders), 0
            remainders.append(place)
            mixed_source, mixed_target = max(mixed_source, source), target
        first += count
    if len(remainders) > mixed_start:
        batches.append((pairs + mixed_start, len(remainders) - mixed_start, mixed_source, mixed_target))
    return batches, remainders, []


def mix(pairs: npt.NDArray[np.int32], rows: int, draw: np.random.Generator) -> None:
    """Shuffle ``pairs`` (N,) that stand in the order of their lengths, each within ``rows`` neighbours, in place."""
    first = min(int(draw.integers(rows)), len(pairs))
    last = len(pairs) - (len(pairs) - first) % rows
    draw.shuffle(pairs[:first])
    windows = pairs[first:last].reshape(-1, rows)
    draw.permuted(windows, axis=1, out=windows)
    draw.shuffle(pairs[last:])
