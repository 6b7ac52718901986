"""The cost of padding is what the tensors of real batches have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from econmt.config.recipe import BatchSize
from econmt.data.batching.batches import BatchIterator
from econmt.data.batching.bucket_shapes import Derived
from econmt.data.batching.buckets import count_lengths
from econmt.data.batching.padding import (
    PlannedBatch,
    measure_padding,
    padded_to_buckets,
    planned,
    random_batches,
    real_work,
)
from econmt.data.batching.pair_flops import PairFlops
from econmt.data.batching.token_store import TokenStore

MakeStore = Callable[[Path, Sequence[tuple[int, int]]], TokenStore]
WORK = PairFlops(2, 5, 1)
SIZES = [BatchSize(type="sentence", size=7), BatchSize(type="word", size=60)]


def test_of_one_batch() -> None:
    found = measure_padding([PlannedBatch(np.array([1, 3]), np.array([2, 1]), (4, 4))], WORK)
    real = (2 + 10 + 2) + (6 + 5 + 3)
    assert found == (1, 2 * (8 + 20 + 16) / real, 2 * (6 + 10 + 6) / real, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", [4, Derived(4, WORK)])
def test_of_an_epoch(
    tmp_path: Path,
    make_store: MakeStore,
    random_lengths: Callable[..., list[tuple[int, int]]],
    size: BatchSize,
    rule: int | Derived,
) -> None:
    store = make_store(tmp_path, random_lengths(150))
    stream = BatchIterator(store, size, rule, 1, max_length=60)
    batches = [next(stream) for _ in range(stream.batches_per_epoch)]

    def cost(shapes: list[tuple[int, int, int]]) -> int:
        return sum(rows * (2 * s + 5 * t + s * t) for rows, s, t in shapes)

    wide = [(len(b.indices), b.source.shape[1], b.target_output.shape[1]) for b in batches]
    tight = [
        (len(b.indices), b.source.shape[1], b.target_output.shape[1]) for b in (b.trimmed() for b in batches)
    ]
    real = cost([(1, s + 1, t + 1) for s, t in zip(store.source_lengths, store.target_lengths, strict=True)])
    found = measure_padding(planned(BatchIterator(store, size, rule, 1, max_length=60)), WORK)
    shapes = [len({shape[1:] for shape in batches}) for batches in (wide, tight)]
    assert found == (shapes[0], cost(wide) / real, cost(tight) / real, shapes[1])
    counts = count_lengths(store.source_lengths, store.target_lengths)
    assert real_work(counts, WORK) == real
    assert padded_to_buckets(counts, rule, size, WORK) == pytest.approx(found[:2])


@pytest.mark.parametrize("size", SIZES)
def test_random_batches_have_every_pair_once_and_are_full(size: BatchSize) -> None:
    draw = np.random.default_rng(5)
    sources, targets = draw.integers(1, 20, (2, 100))
    batches = list(random_batches(sources, targets, size))
    assert sorted(s for batch in batches for s in batch.sources.tolist()) == sorted((sources + 1).tolist())
    for batch, after in itertools.pairwise(batches):
        assert batch.shape == (batch.sources.max(), batch.targets.max())
        if size.type == "sentence":
            assert len(batch.sources) == size.size
        else:
            assert len(batch.targets) * batch.shape[1] <= size.size
            assert (len(batch.targets) + 1) * max(batch.shape[1], after.targets[0]) > size.size
