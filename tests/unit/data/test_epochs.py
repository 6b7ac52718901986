"""Plans of epochs: every pair is in one batch, batches are full, and pairs fit into the shapes of their batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from econmt.data.batching.bucket_shapes import Derived
from econmt.data.batching.epochs import EpochTable, plan_epoch
from econmt.data.batching.pair_flops import PairFlops

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


@settings(max_examples=80, deadline=None)
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
