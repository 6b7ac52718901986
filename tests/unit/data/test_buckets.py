"""Pairs are sorted into buckets of their rounded shapes, planned into batches, and padded at a known cost."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from econmt.config.recipe import BatchSize
from econmt.data.batching import buckets as module
from econmt.data.batching import padding
from econmt.data.batching.batches import BatchIterator
from econmt.data.batching.bucket_shapes import Derived
from econmt.data.batching.buckets import Buckets, assign_buckets, bucket_table, count_lengths
from econmt.data.batching.epochs import EpochTable, plan_epoch
from econmt.data.batching.pair_flops import PairFlops
from tests.unit.data.conftest import random_lengths, store_of

lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def starts_of(buckets: Buckets) -> np.ndarray:
    """Start of each bucket in the order of pairs."""
    return np.cumsum(buckets.counts) - buckets.counts


def test_order_of_buckets_and_of_pairs_inside_and_capacity_makes_room_for_longer_pairs() -> None:
    found = assign_buckets(*arrays([(9, 1), (1, 9), (2, 2), (3, 3), (1, 10), (8, 1)]), 4)
    assert found.shapes.tolist() == [[4, 4], [12, 4], [4, 12]]
    assert found.counts.tolist() == [2, 2, 2]
    assert found.order.tolist() == [2, 3, 0, 5, 1, 4]
    assert starts_of(found).tolist() == [0, 2, 4]
    capacity = np.array([2, 2, 5, 9])
    for rule, shapes in ((2, [[10, 4], [4, 6]]), (Derived(4, PairFlops(1, 1, 0)), [[10, 3], [3, 6]])):
        assert assign_buckets(*arrays([(1, 2), (3, 0)]), rule, capacity).shapes.tolist() == shapes


@settings(max_examples=80)
@given(lengths, st.integers(1, 13), st.integers(1, 9))
def test_every_pair_is_in_its_bucket(pairs: list[tuple[int, int]], width: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        found = assign_buckets(*arrays(pairs), width)
    assert sorted(found.order.tolist()) == list(range(len(pairs)))
    assert found.order.dtype == np.int32
    for start, count, shape in zip(starts_of(found), found.counts, found.shapes.tolist(), strict=True):
        members = found.order[start : start + count].tolist()
        assert members == sorted(members)
        for source, target in (pairs[i] for i in members):
            assert [-(-(source + 1) // width) * width, -(-(target + 1) // width) * width] == shape


def test_pages_are_given_back_after_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 2)
    calls: list[int] = []
    assign_buckets(*arrays([(1, 1)] * 5), 4, release=lambda: calls.append(1))
    assert len(calls) == 6


def test_table_counts_real_and_padded_positions() -> None:
    table = bucket_table(count_lengths(*arrays([(3, 3), (2, 1), (9, 2), (5, 6)])), 4)
    rows = [tuple(row) for row in table]
    assert rows == [(4, 4, 12, 3, (4 + 4) + (3 + 2) + (10 + 3), 8 + 8 + 16), (8, 8, 8, 1, 6 + 7, 16)]


@settings(max_examples=60)
@given(lengths.filter(bool), st.integers(1, 5), st.integers(1, 9))
def test_every_pair_is_in_a_derived_bucket_that_holds_it(
    pairs: list[tuple[int, int]], most: int, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        found = assign_buckets(*arrays(pairs), Derived(most, PairFlops(2, 5, 1)))
    assert sorted(found.order.tolist()) == list(range(len(pairs)))
    assert len(found.shapes) <= most
    assert found.counts.sum() == found.alike.sum() == len(pairs)
    for start, count, shape in zip(starts_of(found), found.counts, found.shapes.tolist(), strict=True):
        for index in found.order[start : start + count].tolist():
            assert pairs[index][0] < shape[0]
            assert pairs[index][1] < shape[1]
    ends = np.cumsum(found.alike)
    for start, end in zip((ends - found.alike).tolist(), ends.tolist(), strict=True):
        assert len({pairs[index] for index in found.order[start:end].tolist()}) == 1


def test_pairs_of_a_derived_bucket_stand_in_the_order_of_their_lengths() -> None:
    pairs = [(3, 2), (1, 1), (2, 2), (1, 2), (3, 1), (2, 1), (1, 1)]
    found = assign_buckets(*arrays(pairs), Derived(1, PairFlops(1, 1, 0)))
    assert found.shapes.tolist() == [[4, 3]]
    ordered = [(1, 1), (1, 1), (2, 1), (3, 1), (3, 2), (2, 2), (1, 2)]
    assert [pairs[index] for index in found.order.tolist()] == ordered
    assert found.alike.tolist() == [2, 1, 1, 1, 1, 1]


def test_more_pairs_of_lengths_than_16_bits_count_are_told_apart() -> None:
    # A grid of 260 x 260 lengths, each once, from the longest to the shortest.
    source, target = (side.ravel()[::-1].astype(np.int32) for side in np.mgrid[:260, :260])
    one = np.array([[260, 260]])
    found = assign_buckets(source, target, Derived(1, PairFlops(1, 1, 0)), shapes=one)
    assert found.alike.tolist() == [1] * 260 * 260
    assert np.array_equal(np.sort(found.order), np.arange(260 * 260))
    ordered = target[found.order]
    assert (np.diff(ordered) >= 0).all()
    assert (ordered[0], ordered[-1]) == (0, 259)


RULE = Derived(12, PairFlops(1, 2, 0))
buckets = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9), st.integers(1, 5)),
    min_size=1,
    max_size=9,
    unique_by=lambda bucket: bucket[:2],
)
"""Target and source positions, pairs, and rows of a full batch."""


def positions_of(table: EpochTable, pairs: int) -> list[list[int]]:
    """The positions of the pairs of each batch."""
    found = []
    for start, rows in zip(table.starts.tolist(), table.rows.tolist(), strict=True):
        if start < pairs:
            found.append(list(range(start, start + rows)))
        else:
            found.append(table.remainders[start - pairs : start - pairs + rows].tolist())
    return found


def plan(given_buckets: list[tuple[int, int, int, int]], rule: int | Derived = RULE) -> EpochTable:
    targets, sources, counts, rows = (np.array(column) for column in zip(*given_buckets, strict=True))
    return plan_epoch(np.stack([sources, targets], axis=1), counts, rows.tolist(), rule)


@settings(max_examples=80)
@given(buckets.map(sorted))
def test_every_pair_is_in_one_batch_that_has_room_for_it(
    given_buckets: list[tuple[int, int, int, int]],
) -> None:
    table = plan(given_buckets)
    bucket_of = np.repeat(np.arange(len(given_buckets)), [count for *_, count, _ in given_buckets])
    batches = positions_of(table, len(bucket_of))
    assert sorted(position for batch in batches for position in batch) == list(range(len(bucket_of)))
    size = {(source, target): rows for target, source, _, rows in given_buckets}
    for batch, (source, target) in zip(batches, table.shapes.tolist(), strict=True):
        assert 1 <= len(batch) <= size[source, target]
        for position in batch:
            own_target, own_source, *_ = given_buckets[bucket_of[position]]
            assert own_source <= source
            assert own_target <= target
        if len(batch) < size[source, target]:  # no later bucket has room for its pairs
            later = [each for each in given_buckets if each[:2] > (target, source)]
            assert all(other_source < source for _, other_source, *_ in later)


@settings(max_examples=80)
@given(buckets.map(sorted))
def test_batches_of_mixed_shape_are_no_larger_than_their_pairs(
    given_buckets: list[tuple[int, int, int, int]],
) -> None:
    """With fixed buckets; none takes over a length of the batch before."""
    table = plan(given_buckets, 1)
    bucket_of = np.repeat(np.arange(len(given_buckets)), [count for *_, count, _ in given_buckets])
    batches = positions_of(table, len(bucket_of))
    assert sorted(position for batch in batches for position in batch) == list(range(len(bucket_of)))
    for batch, shape in zip(batches, table.shapes.tolist(), strict=True):
        pairs = [given_buckets[bucket_of[position]] for position in batch]
        assert shape == [max(source for _, source, *_ in pairs), max(target for target, *_ in pairs)]


def test_what_remains_goes_to_the_next_bucket_with_room() -> None:
    # Sources 3 and 9 of target 5, then 4 and 9 of target 8: what remains of the second goes past the third.
    table = plan([(5, 3, 5, 4), (5, 9, 5, 4), (8, 4, 4, 4), (8, 9, 7, 4)])
    assert positions_of(table, 21) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],  # the last pair of the first bucket with those that follow
        [10, 11, 12, 13],
        [8, 9, 14, 15],  # two that remain of the second bucket with the first of the last one
        [16, 17, 18, 19],
        [20],
    ]
    assert table.shapes.tolist() == [[3, 5], [9, 5], [4, 8], [9, 8], [9, 8], [9, 8]]
    assert table.windows.tolist() == [[0, 4, 4], [4, 8, 4], [10, 14, 4], [16, 21, 4]]


WORK = PairFlops(2, 5, 1)
SIZES = [BatchSize(type="sentence", size=7), BatchSize(type="word", size=60)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", [4, Derived(4, WORK)])
def test_of_an_epoch(tmp_path: Path, size: BatchSize, rule: int | Derived) -> None:
    store = store_of(tmp_path, random_lengths(150))
    stream = BatchIterator(store, size, rule, 1, max_length=60)
    batches = [next(stream) for _ in range(stream.batches_per_epoch)]

    def cost(shapes: list[tuple[int, int, int]]) -> int:
        return sum(rows * (2 * s + 5 * t + s * t) for rows, s, t in shapes)

    wide = [(len(b.indices), b.source.shape[1], b.target_output.shape[1]) for b in batches]
    tight = [
        (len(b.indices), b.source.shape[1], b.target_output.shape[1]) for b in (b.trimmed() for b in batches)
    ]
    real = cost([(1, s + 1, t + 1) for s, t in zip(store.source_lengths, store.target_lengths, strict=True)])
    found = padding.measure_padding(padding.planned(BatchIterator(store, size, rule, 1, max_length=60)), WORK)
    assert found == (len({shape[1:] for shape in wide}), cost(wide) / real, cost(tight) / real)
    counts = count_lengths(store.source_lengths, store.target_lengths)
    assert padding.real_work(counts, WORK) == real
    assert padding.padded_to_buckets(counts, rule, size, WORK) == pytest.approx(found[:2])


@pytest.mark.parametrize("size", SIZES)
def test_random_batches_have_every_pair_once_and_are_full(size: BatchSize) -> None:
    sources, targets = np.random.default_rng(5).integers(1, 20, (2, 100))
    batches = list(padding.random_batches(sources, targets, size))
    assert sorted(s for batch in batches for s in batch.sources.tolist()) == sorted((sources + 1).tolist())
    for batch, after in itertools.pairwise(batches):
        assert batch.shape == (batch.sources.max(), batch.targets.max())
        if size.type == "sentence":
            assert len(batch.sources) == size.size
        else:
            assert len(batch.targets) * batch.shape[1] <= size.size
            assert (len(batch.targets) + 1) * max(batch.shape[1], after.targets[0]) > size.size
