"""Pairs are sorted into buckets of their rounded shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from econmt.data.batching import buckets as module
from econmt.data.batching.bucket_shapes import Derived
from econmt.data.batching.buckets import Buckets, assign_buckets, bucket_table, count_lengths, round_up
from econmt.data.batching.pair_flops import PairFlops

lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def starts_of(buckets: Buckets) -> np.ndarray:
    """Start of each bucket in the order of pairs."""
    return np.cumsum(buckets.counts) - buckets.counts


def test_room_for_the_end_mark() -> None:
    assert assign_buckets(*arrays([(7, 8)]), 8).shapes.tolist() == [[8, 16]]
    assert assign_buckets(*arrays([(0, 0)]), 1).shapes.tolist() == [[1, 1]]


def test_order_of_buckets_and_of_pairs_inside() -> None:
    pairs = [(9, 1), (1, 9), (2, 2), (3, 3), (1, 10), (8, 1)]
    found = assign_buckets(*arrays(pairs), 4)
    assert found.shapes.tolist() == [[4, 4], [12, 4], [4, 12]]
    assert found.counts.tolist() == [2, 2, 2]
    assert found.order.tolist() == [2, 3, 0, 5, 1, 4]
    assert starts_of(found).tolist() == [0, 2, 4]


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


def test_capacity_makes_room_for_longer_pairs() -> None:
    capacity = np.array([2, 2, 5, 9])
    for rule, shapes in ((2, [[10, 4], [4, 6]]), (Derived(4, PairFlops(1, 1, 0)), [[10, 3], [3, 6]])):
        assert assign_buckets(*arrays([(1, 2), (3, 0)]), rule, capacity).shapes.tolist() == shapes


def test_pages_are_given_back_after_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 2)
    calls: list[int] = []
    assign_buckets(*arrays([(1, 1)] * 5), 4, release=lambda: calls.append(1))
    assert len(calls) == 6


def test_rounding() -> None:
    assert round_up(np.array([1, 8, 9, 0]), 8).tolist() == [8, 8, 16, 0]


def test_table_counts_real_and_padded_positions() -> None:
    table = bucket_table(count_lengths(*arrays([(3, 3), (2, 1), (9, 2), (5, 6)])), 4)
    assert [tuple(row) for row in table] == [
        (4, 4, 12, 3, (4 + 4) + (3 + 2) + (10 + 3), 8 + 8 + 16),
        (8, 8, 8, 1, 6 + 7, 16),
    ]


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


def test_table_of_derived_buckets_has_a_row_each() -> None:
    counts = count_lengths(*arrays([(3, 3), (2, 1), (9, 2), (5, 6)]))
    table = bucket_table(counts, Derived(2, PairFlops(1, 1, 0)))
    assert [tuple(row) for row in table] == [(4, 4, 4, 2, 8 + 5, 16), (7, 10, 10, 2, 13 + 13, 34)]


def test_more_pairs_of_lengths_than_16_bits_count_are_told_apart() -> None:
    """A grid of 260 x 260 lengths, each once, from the longest to the shortest."""
    source, target = (side.ravel()[::-1].astype(np.int32) for side in np.mgrid[:260, :260])
    one = np.array([[260, 260]])
    found = assign_buckets(source, target, Derived(1, PairFlops(1, 1, 0)), shapes=one)
    assert found.alike.tolist() == [1] * 260 * 260
    assert np.array_equal(np.sort(found.order), np.arange(260 * 260))
    ordered = target[found.order]
    assert (np.diff(ordered) >= 0).all()
    assert (ordered[0], ordered[-1]) == (0, 259)
