"""Mixtures and noise: which pairs an epoch has, what becomes of them, and that both follow from seed and epoch alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from econmt.config.recipe import Mixing, Recipe
from econmt.data.batching import noise as noises
from econmt.data.batching.batches import Batch, BatchIterator, training_batches
from econmt.data.batching.bucket_shapes import Derived
from econmt.data.batching.changing_epochs import ChangingEpochs
from econmt.data.batching.mixtures import Mixture
from econmt.data.batching.noise import EMOJI, MARKUP, TITLE, TYPOS, UPPER, NoiseMaker, changed_text, mistyped
from econmt.data.batching.pair_flops import PairFlops
from econmt.data.batching.store import PreparedData, prepare
from econmt.data.batching.token_store import PairIds
from econmt.data.text.vocabulary import UNK
from econmt.errors import InputError
from tests.unit.data.conftest import made_up_pairs, write_pairs

Make = Callable[..., Recipe]
Prepare = Callable[..., tuple[Recipe, PreparedData]]


def mixture(firsts: list[int], pairs: int, **settings: Any) -> Mixture:
    return Mixture(Mixing.model_validate(settings), firsts, pairs, 3, list("abc"))


def test_shares_are_exact_and_every_pair_comes_first() -> None:
    stages = {"weights": [[1, 2], [3, 0], [1, 1]], "epochs": [5, 2]}
    mixed, again = (mixture([0, 10], 17, **stages, epoch_pairs=16) for _ in range(2))
    counts = [[5, 11], [5, 11], [16, 0], [16, 0], [8, 8], [8, 8]]
    assert [mixed.counts(epoch) for epoch in (0, 4, 5, 6, 7, 99)] == counts
    seen = [mixed.pairs(epoch).tolist() for epoch in range(9)]
    assert all(len(epoch) == 16 for epoch in seen)
    for first, end in ((0, 10), (10, 17)):
        own = [pair for epoch in seen for pair in epoch if first <= pair < end]
        for begin in range(0, len(own) - (end - first) + 1, end - first):
            assert sorted(own[begin : begin + end - first]) == list(range(first, end))
    assert again.pairs(7).tolist() == seen[7]
    assert seen[0] != seen[2]


def test_what_is_left_over_goes_to_the_largest_remainders() -> None:
    mixed = mixture([0, 3, 6], 9, weights=[[1.0, 1.0, 0.1]])
    assert mixed.counts(0) == [4, 4, 1], "as many as all corpora have, since no epoch_pairs are given"
    assert mixture([0, 3, 6], 9, weights=[[0.3, 0.3, 0.4]], epoch_pairs=1).counts(0) == [0, 0, 1]
    equal = mixture([0, 3, 6], 9, weights=[[1.0, 1.0, 1.0]], epoch_pairs=5)
    assert equal.counts(0) == [2, 2, 1], "of equal remainders those of the first corpora"


def test_an_empty_corpus_must_have_no_weight() -> None:
    with pytest.raises(InputError, match=r"data\.mixing\.weights: b has no training pairs left"):
        mixture([0, 9], 9, weights=[[1, 0], [1, 1]], epochs=[1])
    assert mixture([0, 9], 9, weights=[[1, 0]]).counts(0) == [9, 0]


@pytest.fixture
def run(corpus: Path, make_recipe: Make) -> Prepare:
    """A recipe over two corpora, the second with a tag, and its store."""
    write_pairs(corpus, "back", made_up_pairs(60, seed=21))

    def make(**changes: Any) -> tuple[Recipe, PreparedData]:
        settings: dict[str, Any] = {"train": ["train", "back"], "tags": ["", "<BT>"], **changes}
        recipe = make_recipe(**settings)
        return recipe, prepare(recipe, Path("store"), [corpus], show_progress=False)

    return make


def take(stream: BatchIterator, count: int) -> list[Batch]:
    return [next(stream) for _ in range(count)]


ALL_NOISE = {"upper": 0.2, "title": 0.2, "typos": 0.3, "emoji": 0.2, "markup": 0.2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_stream_goes_on_exactly_anywhere(run: Prepare, dropout: float) -> None:
    mixing = {"weights": [[1, 1], [0, 1]], "epochs": [2], "epoch_pairs": 150}
    recipe, prepared = run(
        mixing=mixing, noise=ALL_NOISE, subwords={"type": "bpe", "size": 90, "dropout": dropout}
    )
    whole = training_batches(recipe, prepared)
    places, batches = [], []
    for _ in range(12):
        places.append(whole.state_dict())
        batches.append(next(whole))
    assert {place["epoch"] for place in places} >= {0, 1, 2}
    for number in (1, 4, 7, 11):
        again = training_batches(recipe, prepared)
        again.load_state_dict(places[number])
        for one, other in zip(take(again, 12 - number), batches[number:], strict=True):
            for name in ("source", "target_output", "indices"):
                assert torch.equal(getattr(one, name), getattr(other, name))


def test_epochs_have_the_corpora_of_their_stage_with_their_tag(run: Prepare) -> None:
    recipe, prepared = run(mixing={"weights": [[1, 3], [1, 0]], "epochs": [1], "epoch_pairs": 200})
    stream = training_batches(recipe, prepared)
    first = take(stream, stream.batches_per_epoch)
    indices = Counter(index for batch in first for index in batch.indices.tolist())
    assert sum(count for index, count in indices.items() if index >= 200) == 150
    assert {count for index, count in indices.items() if index >= 200} == {2, 3}
    assert all(
        prepared.vocabularies.source.decode(ids.tolist()).startswith("<BT> ") == (index >= 200)
        for batch in first
        for index, ids in zip(batch.indices.tolist(), batch.source, strict=True)
    )
    second = take(stream, stream.batches_per_epoch)
    indices += Counter(index for batch in second for index in batch.indices.tolist())
    counts = [indices[index] for index in range(200)]
    assert (set(counts), sum(counts)) == ({1, 2}, 250), "50 of them came before, and only they come again"
    assert stream.epoch == 2


@pytest.mark.parametrize(
    "subwords", [{"type": "bpe", "size": 60}, {"type": "unigram", "size": 90}, {"type": "words"}]
)
def test_a_tag_is_one_token_and_text_stays_text(run: Prepare, subwords: dict[str, Any]) -> None:
    _, prepared = run(subwords=subwords)
    source = prepared.vocabularies.source
    ids = source.encode("<BT> ba de")
    assert len(ids) == len(source.encode("ba de")) + 1
    assert UNK not in ids
    assert source.decode(ids) == "<BT> ba de"


def test_bpe_dropout_leaves_tags_whole(run: Prepare) -> None:
    recipe, prepared = run(
        subwords={"type": "bpe", "size": 90, "dropout": 0.9}, mixing={"weights": [[0, 1]]}, max_length=300
    )
    firsts = {
        row for batch in take(training_batches(recipe, prepared), 5) for row in batch.source[:, 0].tolist()
    }
    assert firsts == {prepared.vocabularies.source.encode("<BT>")[0]}


def test_shapes_are_those_of_all_epochs(run: Prepare) -> None:
    recipe, prepared = run(
        mixing={"weights": [[1, 0], [0, 1]], "epochs": [1]}, noise=ALL_NOISE, max_length=40
    )
    stream = training_batches(recipe, prepared)
    rows = {(shape.source, shape.target): shape.rows for shape in stream.shapes()}
    assert all(shape.batches > 0 for shape in stream.shapes()), "none is left out when memory is planned"
    assert rows == {(s.source, s.target): s.rows for s in stream.shapes()}
    for _ in range(4):
        for batch in take(stream, stream.batches_per_epoch):
            assert len(batch.indices) <= rows[batch.positions]
        assert rows == {(s.source, s.target): s.rows for s in stream.shapes()}
    for source, target in rows:
        largest = stream.largest_batch(source, target)
        assert largest.positions == (source, target)
        assert len(largest.indices) == rows[source, target]
    worst = stream.worst_batch()
    volume = len(worst.indices) * worst.positions[0] * worst.positions[1]
    assert volume == max(count * s * t for (s, t), count in rows.items())


def test_every_noise_is_drawn_as_often_as_it_says(run: Prepare) -> None:
    """By itself, but capitals of both kinds exclude each other; and nothing of it is in the store."""
    plain = run()[1]
    recipe, prepared = run(noise=ALL_NOISE)
    for index in range(260):
        for one, other in zip(plain.train.pair(index), prepared.train.pair(index), strict=True):
            assert np.array_equal(one, other)
    maker = NoiseMaker(recipe.pairs.noise, prepared.vocabularies, recipe.pairs.tags, prepared.train)
    kinds = maker.draw(20000, (3, 1))
    bits = {"upper": UPPER, "title": TITLE, "typos": TYPOS, "emoji": EMOJI, "markup": MARKUP}
    for name, bit in bits.items():
        assert ((kinds & bit) != 0).mean() == pytest.approx(ALL_NOISE[name], abs=0.015)
    assert not ((kinds & UPPER) & ((kinds & TITLE) >> 1)).any()
    both = ((kinds & EMOJI) != 0) & ((kinds & MARKUP) != 0)
    assert both.mean() == pytest.approx(0.04, abs=0.01)
    assert not np.array_equal(kinds, maker.draw(20000, (3, 2)))


def applied(
    maker: NoiseMaker, prepared: PreparedData, kind: int, places: Any, room: tuple[int, int]
) -> PairIds:
    """Pairs with noise of one kind."""
    kinds = np.full(len(places), kind, dtype=np.uint8)
    return maker.apply(kinds, places, prepared.train.gather(places), room, (1, 2))


def test_what_cannot_be_written_is_unknown_on_both_sides(run: Prepare) -> None:
    _, prepared = run(subwords={"type": "bpe", "size": 60, "character_coverage": 1.0})
    recipe, _ = run(noise={"emoji": 0.99})
    maker = NoiseMaker(recipe.pairs.noise, prepared.vocabularies, [], prepared.train)
    for kind in (EMOJI, MARKUP):
        after = applied(maker, prepared, kind, np.arange(20), (400, 400))
        for side in (after.source, after.target):
            assert all(UNK in row.tolist() for row in side)


def test_without_weights_every_pair_comes_once_an_epoch_and_validation_has_no_tag(run: Prepare) -> None:
    recipe, prepared = run(noise=ALL_NOISE)
    stream = training_batches(recipe, prepared)
    for _ in range(2):
        batches = take(stream, stream.batches_per_epoch)
        assert sorted(index for batch in batches for index in batch.indices.tolist()) == list(range(260))
    tag = prepared.vocabularies.source.encode("<BT>")[0]
    assert all(prepared.train.pair(index)[0][0] == tag for index in range(200, 260))
    assert not any(tag in prepared.valid.pair(index)[0] for index in range(len(prepared.valid)))


def test_what_each_noise_does() -> None:
    assert len(set(noises._EMOJI)) == len(noises._EMOJI) == 40
    assert not any(sign.isalnum() or sign.isspace() for sign in noises._EMOJI)
    draw = np.random.Generator(np.random.PCG64(5))
    assert changed_text(UPPER, "a dog", "ein süßer Hund", draw) == ("A DOG", "EIN SÜSSER HUND")
    assert changed_text(TITLE, "it's a  dOg", "ein Hund", draw) == ("It's A  DOg", "Ein Hund")
    source, target = changed_text(EMOJI, "a dog", "ein Hund", draw)
    assert set(source.split()) - {"a", "dog"} == set(target.split()) - {"ein", "Hund"} != set()
    places = []
    for seed in range(20):
        pair = changed_text(EMOJI, "a dog", "ein Hund", np.random.Generator(np.random.PCG64(seed)))
        first, last = ({text.split(" ")[end] for text in pair} for end in (0, -1))
        assert min(len(first), len(last)) == 1, "the same one, on the same end of both sides"
        places.append(len(first))
    assert 10 < places.count(2) < 20, "at the end of three of four"
    source, target = changed_text(MARKUP, "a dog", "ein Hund", draw)
    begin, end = source.split("a dog")
    assert target == f"{begin}ein Hund{end}"
    assert end == f"</{begin[1:-1].split()[0]}>"
    source, target = changed_text(TYPOS, "the quick brown", "ein Hund", draw)
    assert (source != "the quick brown", target) == (True, "ein Hund")


def test_pairs_whose_noise_does_not_fit_a_shape_get_none() -> None:
    """Noise that adds so many tokens that the longest pairs have no room for it, and lengths that stay theirs."""
    lengths = np.array([2, 9, 3, 12])
    methods = {"release": lambda self: None, "__len__": lambda self: 4}
    store: Any = type("Store", (), {"source_lengths": lengths, "target_lengths": lengths, **methods})()
    growth = iter([0, 3, 0])

    class Longer:
        """Noise of another length in each epoch; none when the shapes are derived."""

        def draw(self, count: int, seed: object) -> Any:
            self.more = next(growth)
            return np.full(count, 2, dtype=np.uint8)

        def lengths(self, kinds: Any, source: Any, target: Any, most: int) -> Any:
            return source + self.more, target + self.more

    noise: Any = Longer()
    epochs = ChangingEpochs(store, None, noise, Derived(12, PairFlops(1, 2, 0)), None, 50, 3)
    planned = epochs.buckets(0)
    assert epochs.epoch.kinds.tolist() == [2, 2, 2, 0]
    longest = planned.shapes[np.repeat(np.arange(len(planned.shapes)), planned.counts)].max(axis=0)
    assert longest.tolist() == [13, 13]
    epochs.buckets(1)
    assert epochs.epoch.kinds.tolist() == [2, 2, 2, 2], "each epoch for itself"


def test_a_typing_error_changes_one_word_in_ten() -> None:
    text = "the committee will meet again tomorrow morning, and an old dog is in it"
    results = {mistyped(text, np.random.Generator(np.random.PCG64(seed))) for seed in range(200)}
    assert set(Counter(len(result) - len(text) for result in results)) == {-1, 0, 1}
    for result in results:
        assert sum(a != b for a, b in zip(result.split(" "), text.split(" "), strict=True)) == 1
    alike = "aaa aaa aaa"  # where swapped letters are the same
    assert alike not in {mistyped(alike, np.random.Generator(np.random.PCG64(seed))) for seed in range(50)}
    long = mistyped(" ".join(["word"] * 32), np.random.default_rng(2)).split(" ")
    assert sum(word != "word" for word in long) == 3, "one in ten"
    assert mistyped("an ok 12 ...", np.random.default_rng(1)) == "an ok 12 ..."


def test_pairs_with_unknown_tokens_and_what_has_no_room_are_left(run: Prepare) -> None:
    recipe, prepared = run(subwords={"type": "words", "source": 12})
    maker = NoiseMaker(recipe.pairs.noise, prepared.vocabularies, recipe.pairs.tags, prepared.train)
    pairs = prepared.train.gather(np.arange(260))
    after = applied(maker, prepared, MARKUP, np.arange(260), (10, 10))
    unknown = [UNK in row.tolist() for row in pairs.source]
    rows = zip(after.source, pairs.source, pairs.source_lengths, strict=True)
    same = [bool((new[:length] == old[:length]).all()) for new, old, length in rows]
    assert all(left for row, left in enumerate(same) if unknown[row])
    assert not all(same)
    small = applied(maker, prepared, MARKUP, np.arange(260), (0, 0))
    assert np.array_equal(small.source, pairs.source)
    for known, unknown_ids in (([5, 6], [5, UNK]), ([5, UNK], [5, 6])):
        assert maker._changed(MARKUP, known, unknown_ids, [1]) == (known, unknown_ids)


@pytest.mark.parametrize("kind", [UPPER, TITLE, TYPOS, EMOJI, MARKUP])
def test_lengths_grow_as_those_of_the_store_and_never_fall(run: Prepare, kind: int) -> None:
    """By a factor with capitals, else by a number of tokens."""
    recipe, prepared = run(noise=ALL_NOISE)
    capitals = kind in (UPPER, TITLE)

    class Grows(NoiseMaker):
        def _changed(self, kind: int, source: list[int], target: list[int], seed: object) -> Any:
            return source * 2 if capitals else [*source, 5], target[1:]

    maker = Grows(recipe.pairs.noise, prepared.vocabularies, [], prepared.train)
    old, kinds = np.array([3, 10, 40]), np.array([kind, 0, kind], dtype=np.uint8)
    source, target = maker.lengths(kinds, old, old, 50)
    assert source.tolist() == ([6, 10, 50] if capitals else [4, 10, 41])
    assert target.tolist() == [3, 10, 40]


def test_tags_stay_before_noise(run: Prepare) -> None:
    _, prepared = run()
    recipe, _ = run(noise={"upper": 0.99})
    maker = NoiseMaker(recipe.pairs.noise, prepared.vocabularies, ["<BT>"], prepared.train)
    source = prepared.vocabularies.source.encode("<BT> ba de")
    after, _ = maker._changed(TITLE | MARKUP, source, source, [1, 2, 3])
    assert after[0] == source[0]


def test_a_pair_gets_the_same_in_any_batch(run: Prepare) -> None:
    recipe, prepared = run()
    maker = NoiseMaker(recipe.pairs.noise, prepared.vocabularies, [], prepared.train)
    found = []
    for places in (np.arange(40), np.arange(40)[::-1].copy()):
        after = applied(maker, prepared, TYPOS | EMOJI, places, (400, 400))
        rows = zip(places.tolist(), after.source, after.source_lengths, strict=True)
        found.append({place: row[:end].tolist() for place, row, end in rows})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tags": ["<BT>"]}, "tags has 1 entries but train has 2"),
        ({"tags": ["", "BT"]}, "expected a tag of letters and digits"),
        ({"tags": ["", "<unk>"]}, "expected a tag"),
        ({"mixing": {"weights": [[1]]}}, "mixing.weights has 1 weights in stage 1 but train has 2 prefixes"),
        ({"mixing": {"weights": [[1, 1], [1, 1]]}}, "weights has 2 stages and epochs has 0"),
        ({"mixing": {"weights": [[0, 0]]}}, "all weights of stage 1 are 0"),
        ({"noise": {"upper": 0.7, "title": 0.7}}, "exclude each other"),
    ],
)
def test_what_does_not_fit_is_refused(make_recipe: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        make_recipe(train=["a", "b"], **changes)
    assert message in str(refused.value)
