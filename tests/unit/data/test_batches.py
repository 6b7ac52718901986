"""Batches hold what the store holds, each pair once an epoch, in an order that only seed and epoch decide."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from econmt.config.recipe import BatchSize, Recipe
from econmt.data.batching.batches import Batch, BatchIterator, valid_batches
from econmt.data.batching.bpe_dropout import BpeDropout
from econmt.data.batching.bucket_shapes import Derived
from econmt.data.batching.pair_flops import PairFlops
from econmt.data.batching.store import PreparedData, prepare
from econmt.data.batching.token_store import TokenStore
from econmt.data.text.vocabulary import BOS, EOS, PAD
from tests.unit.data.conftest import random_lengths, store_of

SENTENCES = BatchSize(type="sentence", size=4)
WORDS = BatchSize(type="word", size=60)
DERIVED = Derived(3, PairFlops(2, 5, 1))


def iterator(
    store: TokenStore | PreparedData, batch: BatchSize = SENTENCES, seed: int = 1, rule: int | Derived = 4
) -> BatchIterator:
    return BatchIterator(store, batch, rule, seed, max_length=60)


def sentences(size: int) -> BatchSize:
    return BatchSize(type="sentence", size=size)


def shape_of(batch: Batch) -> tuple[int, int]:
    return batch.source.shape[1], batch.target_output.shape[1]


def epoch_of(stream: BatchIterator) -> list[Batch]:
    return [next(stream) for _ in range(stream.batches_per_epoch)]


def real(batch: Batch) -> Batch:
    """The rows that do not stand in."""
    return batch.part(slice(0, int((batch.indices >= 0).sum())))


def pairs_of(batches: list[Batch]) -> list[int]:
    return [index for batch in batches for index in batch.indices.tolist() if index >= 0]


NAMES = ("source", "source_lengths", "target_input", "target_output", "target_lengths", "indices")


def same(first: Batch, second: Batch) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in NAMES)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return store_of(tmp_path, random_lengths(150))


def check_batch(batch: Batch, lengths: Sequence[tuple[int, int]]) -> None:
    """Every tensor against the ids that ``store_of`` writes."""
    for row, index in enumerate(batch.indices.tolist()):
        source, target = (
            [begin + 100 * index + place for place in range(length)]
            for begin, length in zip((1000, 500_000), lengths[index], strict=True)
        )
        rest, more = (
            [PAD] * (width - len(ids) - 1)
            for width, ids in zip(shape_of(batch), (source, target), strict=True)
        )
        assert batch.source[row].tolist() == [*source, EOS, *rest]
        assert batch.target_output[row].tolist() == [*target, EOS, *more]
        assert batch.target_input[row].tolist() == [BOS, *target, *more]
        assert int(batch.source_lengths[row]) == len(source) + 1
        assert int(batch.target_lengths[row]) == len(target) + 1
    assert batch.target_tokens == int((batch.target_output != PAD).sum())
    assert batch.source_tokens == int((batch.source != PAD).sum())


lengths_of_pairs = st.lists(st.tuples(st.integers(1, 25), st.integers(1, 25)), min_size=1, max_size=70)
batch_sizes = st.one_of(
    st.builds(lambda size: BatchSize(type="sentence", size=size), st.integers(1, 20)),
    st.builds(lambda size: BatchSize(type="word", size=size), st.integers(1, 200)),
)


@settings(max_examples=80)
@given(
    lengths_of_pairs,
    batch_sizes,
    st.one_of(st.integers(1, 9), st.integers(1, 6).map(lambda most: Derived(most, PairFlops(2, 5, 1)))),
    st.integers(1, 4),
    st.integers(0, 2**31 - 1),
)
def test_every_pair_once_an_epoch_over_all_ranks(
    lengths: list[tuple[int, int]], size: BatchSize, rule: int | Derived, ranks: int, seed: int
) -> None:
    """In fixed buckets, or in as few shapes as derived ones may have; a rank's rows follow those of the one before."""
    with tempfile.TemporaryDirectory() as folder:
        stream = BatchIterator(store_of(Path(folder), lengths), size, rule, seed, max_length=25)
        shapes = {shape[:2] for shape in stream.shapes()}
        assert isinstance(rule, int) or len(shapes) <= rule.most
        for epoch in range(2):
            assert stream.epoch == epoch
            batches = epoch_of(stream)
            assert sorted(pairs_of(batches)) == list(range(len(lengths)))
            for whole in batches:
                parts = [whole.share(rank, ranks) for rank in range(ranks)]
                assert whole.indices.tolist() == pairs_of(parts)
                assert whole.target_tokens == sum(part.target_tokens for part in parts)
                assert whole.source_tokens == sum(part.source_tokens for part in parts)
                ((source, target),) = {(part.source.shape[1], part.target_output.shape[1]) for part in parts}
                assert isinstance(rule, int) or (source, target) in shapes
                assert len(whole.indices) <= (
                    size.size if size.type == "sentence" else max(1, size.size // target)
                )
                assert not isinstance(rule, int) or source % rule == target % rule == 0
                for part in parts:
                    check_batch(real(part), lengths)


@settings(max_examples=30)
@given(lengths_of_pairs, batch_sizes, st.sampled_from([4, DERIVED]), st.integers(0, 60))
def test_restored_in_the_middle_it_goes_on_the_same(
    lengths: list[tuple[int, int]], size: BatchSize, rule: int | Derived, taken: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(Path(folder), lengths)
        stream, again = (BatchIterator(store, size, rule, 3, max_length=60) for _ in range(2))
        for _ in range(taken):
            next(stream)
        again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert again.epoch == taken // again.batches_per_epoch
        assert all(same(next(again), next(stream)) for _ in range(2 * stream.batches_per_epoch))


def test_each_epoch_and_seed_has_other_batches_in_another_order(store: TokenStore | PreparedData) -> None:
    stream = iterator(store)
    first, second = epoch_of(stream), epoch_of(stream)
    together = [{frozenset(batch.indices.tolist()) for batch in batches} for batches in (first, second)]
    assert len(together[0] & together[1]) < len(first) // 2
    assert pairs_of(first) != pairs_of(second)
    assert pairs_of(epoch_of(iterator(store, seed=2))) not in (pairs_of(first), pairs_of(second))
    stream = iterator(store)
    orders = [[batch.target_output.shape[1] for batch in epoch_of(stream)] for _ in range(2)]
    for order in orders:
        assert sum(before > after for before, after in itertools.pairwise(order)) > len(order) // 5
    assert orders[0] != orders[1]


def test_to_moves_every_tensor(store: TokenStore) -> None:
    batch = next(iterator(store))
    moved = batch.to(torch.device("meta"))
    assert moved.source.device.type == moved.target_lengths.device.type == "meta"
    assert moved.indices.device.type == "meta"
    assert (moved.target_tokens, moved.source_tokens) == (batch.target_tokens, batch.source_tokens)
    assert same(batch.to("cpu"), batch)


def test_a_rank_without_a_row_gets_one_that_counts_nothing(tmp_path: Path) -> None:
    batch = next(iterator(store_of(tmp_path, [(3, 4)]))).share(1, 2)
    assert batch.indices.tolist() == [-1]
    for part in (batch, *batch.split(1), batch.first(1)):
        assert (part.source_tokens, part.target_tokens) == (0, 0)
    assert batch.target_lengths.tolist() == [0]
    assert (batch.target_output == PAD).all()
    assert batch.source_lengths.tolist() == [1]
    trimmed = batch.trimmed()
    assert (trimmed.source.shape, trimmed.target_output.shape) == ((1, 1), (1, 1))
    three = next(iterator(store_of(tmp_path, [(3, 2)] * 3))).share(1, 2)
    assert [(part.source_tokens, part.target_tokens) for part in three.split(1)] == [(4, 3), (0, 0)]


@pytest.mark.parametrize(("size", "rule", "rows"), [(8, 4, {8: 15}), (7, DERIVED, {7: 17, 1: 1})], ids=str)
def test_remainders_share_batches(
    tmp_path: Path, size: int, rule: int | Derived, rows: dict[int, int]
) -> None:
    lengths = [(length, length) for length in range(1, 25) for _ in range(5)]
    stream = iterator(store_of(tmp_path, lengths), sentences(size), rule=rule)
    assert Counter(len(batch.indices) for batch in epoch_of(stream)) == rows


@pytest.mark.parametrize("batch", [SENTENCES, WORDS])
def test_many_derived_shapes_hold_all_pairs_in_full_batches(tmp_path: Path, batch: BatchSize) -> None:
    draw = np.random.default_rng(1)
    target = draw.integers(1, 30, 2000)
    source = np.clip(target + draw.integers(-8, 9, 2000), 1, 30)
    store = store_of(tmp_path, list(zip(source.tolist(), target.tolist(), strict=True)))
    stream = iterator(store, batch, rule=Derived(60, PairFlops(1, 2, 0), price=20))
    shapes = {shape[:2]: shape.rows for shape in stream.shapes()}
    assert len(shapes) > 40
    for _ in range(2):
        batches = epoch_of(stream)
        assert sorted(pairs_of(batches)) == list(range(2000))
        sizes = [len(each.indices) for each in batches]
        full = [shapes[shape_of(each)] for each in batches]
        assert sum(size < most for size, most in zip(sizes, full, strict=True)) <= 1


def test_worst_batch_is_the_largest_of_an_epoch(store: TokenStore, tmp_path: Path) -> None:
    def volume(batch: Batch) -> int:
        return batch.source.numel() * batch.target_output.shape[1]

    (tmp_path / "oblong").mkdir()
    # The longer ones make the smaller batch.
    oblong = store_of(tmp_path / "oblong", [(30, 2)] * 8 + [(10, 10)] * 8)
    for size, pairs in ((SENTENCES, store), (WORDS, store), (SENTENCES, oblong)):
        stream = iterator(pairs, size)
        assert volume(stream.worst_batch()) == max(volume(batch) for batch in epoch_of(stream))
        assert stream.state_dict()["position"] == 0


def test_another_batch_size_goes_on_at_the_same_share(store: TokenStore) -> None:
    stream = iterator(store)
    for _ in range(stream.batches_per_epoch + stream.batches_per_epoch // 2):
        next(stream)
    other = iterator(store, sentences(8))
    other.load_state_dict(stream.state_dict())
    state = other.state_dict()
    assert state["epoch"] == 1
    assert abs(state["position"] - other.batches_per_epoch / 2) <= 1
    assert len(next(other).indices) <= 8


class TestValidBatches:
    def test_each_pair_once_without_waste(self, store: TokenStore) -> None:
        batches = list(valid_batches(store, 16))
        assert sorted(pairs_of(batches)) == list(range(150))
        assert [len(batch.indices) for batch in batches] == [16] * 9 + [6]
        for batch in batches:
            check_batch(batch, random_lengths(150))
            assert batch.source.shape[1] == int(batch.source_lengths.max())
            assert batch.target_output.shape[1] == int(batch.target_lengths.max())

    def test_pairs_with_an_empty_side(self, tmp_path: Path) -> None:
        (batch,) = valid_batches(store_of(tmp_path, [(0, 2), (3, 0)]), 4)
        assert batch.source_lengths.tolist() == [4, 1]
        assert batch.target_output.tolist() == [[EOS, PAD, PAD], [500_000, 500_001, EOS]]

    def test_pairs_that_are_too_long_are_left_out(self, tmp_path: Path) -> None:
        store = store_of(tmp_path, [(3, 2), (2, 9), (9, 2), (4, 4)])
        assert sorted(pairs_of(valid_batches(store, 4, 4))) == [0, 3]
        assert sorted(pairs_of(valid_batches(store, 1))) == [0, 1, 2, 3]


class TestDropout:
    @pytest.fixture
    def prepared(self, corpus: Path, tmp_path: Path, make_recipe: Callable[..., Recipe]) -> PreparedData:
        recipe = make_recipe(subwords={"type": "bpe", "size": 60, "dropout": 0.3}, max_length=40)
        return prepare(recipe, tmp_path / "store", [corpus], show_progress=False)

    def stream(
        self, prepared: PreparedData, size: BatchSize = SENTENCES, rule: int | Derived = 4
    ) -> BatchIterator:
        dropout = BpeDropout(prepared.vocabularies, 0.3)
        return BatchIterator(prepared.train, size, rule, 1, max_length=40, dropout=dropout)

    def texts(self, prepared: PreparedData, batches: list[Batch]) -> dict[int, str]:
        decode = prepared.vocabularies.source.decode
        return {
            index: decode(batch.source[row].tolist())
            for batch in batches
            for row, index in enumerate(batch.indices.tolist())
        }

    def test_cuts_change_with_the_epoch_and_the_text_does_not(self, prepared: PreparedData) -> None:
        stream = self.stream(prepared)
        first, second = epoch_of(stream), epoch_of(stream)
        decode = prepared.vocabularies.source.decode
        plain = {index: decode(prepared.train.pair(index)[0].tolist()) for index in range(200)}
        assert self.texts(prepared, first) == self.texts(prepared, second) == plain
        tokens = [sum(batch.source_tokens for batch in batches) for batches in (first, second)]
        assert tokens[0] != tokens[1]
        assert min(tokens) > int(prepared.train.source_lengths.sum()) + 200

    def test_lengths_keep_their_limits(self, prepared: PreparedData) -> None:
        stream = self.stream(prepared, BatchSize(type="word", size=120))
        worst = stream.worst_batch()
        volume = worst.source.numel() * worst.target_output.shape[1]
        for _ in range(3):
            for batch in epoch_of(stream):
                assert int(batch.source_lengths.max()) <= 41
                assert int(batch.target_lengths.max()) <= 41
                assert batch.target_output.numel() <= 120 or len(batch.indices) == 1
                assert batch.source.numel() * batch.target_output.shape[1] <= volume
                assert batch.source.shape[1] - int(batch.source_lengths.max()) < 4

    def test_no_batch_exceeds_the_shapes(self, prepared: PreparedData) -> None:
        stream = self.stream(prepared)
        shapes = stream.shapes()
        for batch in epoch_of(stream):
            needed = (*shape_of(batch), len(batch.source))
            assert any(
                all(have >= need for have, need in zip(shape[:3], needed, strict=True)) for shape in shapes
            )

    def test_derived_buckets_hold_the_cuts_and_no_shape_is_new(self, prepared: PreparedData) -> None:
        stream, again = (
            self.stream(prepared, BatchSize(type="word", size=120), Derived(5, PairFlops(2, 5, 0)))
            for _ in range(2)
        )
        shapes = {tuple(shape) for shape in stream._buckets.shapes.tolist()}
        smaller = 0
        for _ in range(2):
            for (_, planned), batch in zip(list(stream.plan()), epoch_of(stream), strict=True):
                shape = shape_of(batch)
                assert shape in shapes
                assert shape[0] <= planned[0]
                assert shape[1] <= planned[1]
                smaller += shape != planned
                assert batch.target_output.numel() <= 120 or len(batch.indices) == 1
        assert smaller > 0
        again.load_state_dict(stream.state_dict())
        assert all(same(next(again), next(stream)) for _ in range(5))


def test_split_gives_the_fewest_even_parts_of_the_same_rows(tmp_path: Path) -> None:
    (batch,) = epoch_of(iterator(store_of(tmp_path, random_lengths(11)), sentences(11)))
    assert len(batch.indices) == 11
    parts_of = {11: [11], 20: [11], 10: [6, 5], 4: [4, 4, 3], 3: [3, 3, 3, 2], 1: [1] * 11}
    for rows, sizes in parts_of.items():
        parts = batch.split(rows)
        assert [len(part.indices) for part in parts] == sizes
        for name in NAMES:
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
        assert sum(part.target_tokens for part in parts) == batch.target_tokens
        assert sum(part.source_tokens for part in parts) == batch.source_tokens
        assert all(part.target_tokens == int(part.target_lengths.sum()) for part in parts)
    first = batch.first(4)
    assert first.indices.tolist() == batch.indices.tolist()[:4]
    assert first.source.shape[1] == batch.source.shape[1]
    assert first.target_tokens == int(batch.target_lengths[:4].sum())
    assert same(batch.first(11), batch.first(99))


@pytest.mark.parametrize("size", [SENTENCES, WORDS])
def test_shapes_are_those_of_an_epoch(store: TokenStore, size: BatchSize) -> None:
    stream = iterator(store, size)
    found: dict[tuple[int, int], list[int]] = {}
    for batch in epoch_of(stream):
        found.setdefault(shape_of(batch), []).append(len(batch.indices))
    shapes, rows_of = stream.shapes(), {shape: (max(rows), len(rows)) for shape, rows in found.items()}
    assert {shape[:2]: shape[2:] for shape in shapes} == rows_of
    assert [shape[1::-1] for shape in shapes] == sorted(shape[1::-1] for shape in shapes)
    for source, target, rows, _ in shapes:
        batch = stream.largest_batch(source, target)
        assert (len(batch.indices), *shape_of(batch)) == (rows, source, target)


def test_derived_batches_hold_other_pairs_in_each_epoch_but_of_like_lengths(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    source = draw.integers(1, 40, 3000)
    target = np.maximum(source + draw.integers(-2, 3, 3000), 1)
    lengths = list(zip(source.tolist(), target.tolist(), strict=True))
    stream = iterator(store_of(tmp_path, lengths), sentences(16), rule=DERIVED)
    first, second = epoch_of(stream), epoch_of(stream)
    together = [{frozenset(batch.indices.tolist()) for batch in batches} for batches in (first, second)]
    assert len(together[0] & together[1]) < len(first) // 50
    mates = [
        {pair for batch in batches for pair in itertools.combinations(sorted(batch.indices.tolist()), 2)}
        for batches in (first, second)
    ]
    assert len(mates[0] & mates[1]) < 0.6 * len(mates[0])
    trimmed = [batch.trimmed() for batch in first]
    real = sum(batch.source_tokens + batch.target_tokens for batch in trimmed)
    assert real / sum(batch.source.numel() + batch.target_output.numel() for batch in trimmed) > 0.95


def test_trimmed_batches_and_the_plan_of_an_epoch(tmp_path: Path, store: TokenStore) -> None:
    stream = iterator(store, WORDS, rule=DERIVED)
    for (pairs, shape), batch in zip(list(stream.plan()), epoch_of(stream), strict=True):
        assert pairs.tolist() == batch.indices.tolist()
        assert shape == shape_of(batch)
    lengths = random_lengths(40)
    stream = iterator(store_of(tmp_path, lengths), sentences(5), rule=16)
    for batch in epoch_of(stream):
        cut = batch.trimmed()
        check_batch(cut, lengths)
        assert cut.source.shape[1] == int(batch.source_lengths.max())
        assert cut.target_input.shape == cut.target_output.shape
        assert cut.target_output.shape[1] == int(batch.target_lengths.max())
        assert cut.source.is_contiguous()
        assert torch.equal(cut.indices, batch.indices)
        assert same(cut, cut.trimmed())
