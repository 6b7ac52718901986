"""BPE-dropout makes the choices of the paper, agrees with SentencePiece, and depends on its seed alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from econmt.data.batching.bpe_dropout import BpeDropout, BpeSampler, dropout_capacity, gaps_between_skips
from econmt.data.batching.token_store import PairIds
from econmt.data.text.subwords import train_vocabularies
from econmt.data.text.vocabulary import UNK, SentencePieceVocabulary, Vocabularies
from tests.unit.data.test_subwords import data

WORDS = [
    *("lower", "lowest", "newer", "newest", "wide", "wider", "widest", "slow"),
    *("slower", "slowly", "wildest", "größer", "größte", "süßes", "einundzwanzig"),
]


def text(count: int) -> list[tuple[str, str]]:
    draw = random.Random(5)
    return [(" ".join(draw.choices(WORDS, k=8)), " ".join(draw.choices(WORDS, k=6))) for _ in range(count)]


def gaps_of(seed: int, p: float) -> Iterator[int]:
    return gaps_between_skips(np.random.Generator(np.random.PCG64(seed)), p)


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    kind = data(type="bpe", size=80)
    return train_vocabularies(kind, lambda: iter(text(60)), tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def vocabulary(vocabularies: Vocabularies) -> SentencePieceVocabulary:
    assert isinstance(vocabularies.source, SentencePieceVocabulary)
    return vocabularies.source


def test_no_skip_is_sentencepiece_and_all_skips_leave_letters(vocabulary: SentencePieceVocabulary) -> None:
    sampler = BpeSampler(vocabulary, 0.1)
    draw = random.Random(1)
    letters = sorted(set("".join(WORDS)))
    made_up = ["".join(draw.choices(letters, k=draw.randint(1, 14))) for _ in range(400)]
    for word in [*WORDS, *made_up]:
        ids = tuple(vocabulary.encode(word))
        assert sampler.cut(ids, ()).ids == ids, word
    sampler = BpeSampler(vocabulary, 0.1)
    whole = tuple(vocabulary.encode("slowest"))
    letters = tuple(vocabulary.processor.PieceToId(letter) for letter in "\u2581slowest")
    assert len(letters) > len(whole)
    assert sampler.cut(letters, ()).ids == whole
    assert sampler.cut(whole, tuple(range(50))).ids == letters


def exact_distribution(sampler: BpeSampler, word: tuple[int, ...], p: float) -> Counter[tuple[int, ...]]:
    """Probability of each cut, by following both outcomes of every merge whose turn comes."""
    result: Counter[tuple[int, ...]] = Counter()

    def follow(skipped: tuple[int, ...], turn: int, probability: float) -> None:
        cut = sampler.cut(word, skipped)
        if turn == cut.merges:
            result[cut.ids] += probability  # type: ignore[assignment]
            return
        follow(skipped, turn + 1, probability * (1 - p))
        follow((*skipped, turn), turn + 1, probability * p)

    follow((), 0, 1.0)
    return result


def test_frequencies_are_those_of_the_definition(vocabulary: SentencePieceVocabulary) -> None:
    p = 0.3
    sampler = BpeSampler(vocabulary, p)
    words = [tuple(vocabulary.encode(word)) for word in ("slower", "größte", "lowest")]
    expected = [exact_distribution(sampler, word, p) for word in words]
    assert all(sum(distribution.values()) == pytest.approx(1.0) for distribution in expected)
    assert all(len(distribution) > 4 for distribution in expected)
    sentence = list(itertools.chain(*words))
    gaps = gaps_of(11, p)
    found: list[Counter[tuple[int, ...]]] = [Counter() for _ in words]
    for _ in range(8_000):
        cut = sampler.sample(sentence, gaps)
        pieces = vocabulary.tokens(cut)
        starts = [place for place, piece in enumerate(pieces) if piece.startswith("\u2581")]
        for counter, start, end in zip(found, starts, [*starts[1:], len(cut)], strict=True):
            counter[tuple(cut[start:end])] += 1
    for counter, distribution in zip(found, expected, strict=True):
        draws = sum(counter.values())
        assert set(counter) <= set(distribution)
        for cuts, probability in distribution.items():
            # To four standard deviations.
            deviation = (probability * (1 - probability) / draws) ** 0.5
            assert counter[cuts] / draws == pytest.approx(probability, abs=4 * deviation + 1 / draws)
    # SentencePiece's generator cannot be seeded here, so this comparison has to be a coarse one.
    theirs = Counter(
        tuple(vocabulary.processor.SampleEncodeAsIds("lowest", alpha=p, nbest_size=-1)) for _ in range(4000)
    )
    assert set(theirs) <= set(expected[2])
    assert all(abs(theirs[cut] / 4000 - probability) < 0.05 for cut, probability in expected[2].items())
    sampler, gaps = BpeSampler(vocabulary, 0.5), gaps_of(3, 0.5)
    assert sampler.sample([], gaps) == []
    ids = vocabulary.encode("slower 漢字 漢low")
    for _ in range(20):
        cut = sampler.sample(ids, gaps)
        assert cut.count(UNK) == ids.count(UNK) == 2
        assert vocabulary.decode(cut) == "slower <unk> <unk>low"


def test_the_memory_of_cuts_does_not_change_results(
    vocabulary: SentencePieceVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[list[int]]:
        sampler, gaps = BpeSampler(vocabulary, 0.3), gaps_of(4, 0.3)
        return [sampler.sample(vocabulary.encode(source), gaps) for source, _ in text(20)]

    with_memory = run()
    monkeypatch.setattr("econmt.data.batching.bpe_dropout._MAX_CACHED", 1)
    assert run() == with_memory


class TestBatch:
    def rows(self, vocabularies: Vocabularies) -> PairIds:
        """Twelve pairs."""
        sides = []
        for column, vocabulary in enumerate(vocabularies.sides):
            rows = [vocabulary.encode(pair[column]) for pair in text(12)]
            lengths = np.array([len(row) for row in rows])
            ids = np.array([row + [0] * (lengths.max() - len(row)) for row in rows])
            sides += [ids, lengths]
        return PairIds(*sides)

    def resample(
        self,
        vocabularies: Vocabularies,
        chosen: list[int],
        seed: tuple[int, int],
        room: tuple[int, int] = (99, 99),
    ) -> list[tuple[list[int], list[int]]]:
        picked = PairIds(*(array[chosen] for array in self.rows(vocabularies)))
        found = BpeDropout(vocabularies, 0.3).resample(np.array(chosen), picked, room, seed)
        rows = zip(*found, strict=True)
        return [(source[:own].tolist(), target[:other].tolist()) for source, own, target, other in rows]

    def test_a_pair_depends_on_seed_epoch_and_index_alone(self, vocabularies: Vocabularies) -> None:
        together = self.resample(vocabularies, [0, 3, 5, 7], (1, 0))
        assert together == [self.resample(vocabularies, [index], (1, 0))[0] for index in (0, 3, 5, 7)]

    def test_other_epoch_or_seed_other_cuts(self, vocabularies: Vocabularies) -> None:
        keys = (1, 0), (1, 1), (2, 0)
        first, epoch, seed = (self.resample(vocabularies, list(range(12)), key) for key in keys)
        assert epoch != first != seed

    @pytest.mark.parametrize("spare", [0, 1, 5])
    def test_cuts_fit_their_bucket(self, vocabularies: Vocabularies, spare: int) -> None:
        """Without a cut that fits, a pair stays as it is stored; no token of a text is lost."""
        for index, stored in enumerate(zip(*self.rows(vocabularies).lists(), strict=True)):
            room = len(stored[0]) + spare, len(stored[1]) + spare
            for seed in range(3):
                (pair,) = self.resample(vocabularies, [index], (seed, 0), room)
                for ids, most, vocabulary, before in zip(pair, room, vocabularies.sides, stored, strict=True):
                    assert len(ids) <= most
                    assert vocabulary.decode(ids) == vocabulary.decode(before)

    def test_separate_vocabularies(self, tmp_path: Path) -> None:
        kind = data(type="bpe", size=60, joint=False)
        pairs = [(source, target.replace("l", "k")) for source, target in text(60)]
        separate = train_vocabularies(kind, lambda: iter(pairs), tmp_path)
        ids = [vocabulary.encode(side) for vocabulary, side in zip(separate.sides, pairs[0], strict=True)]
        arrays = itertools.chain.from_iterable((np.array([row]), np.array([len(row)])) for row in ids)
        dropout, pair = BpeDropout(separate, 0.3), PairIds(*arrays)
        source, _, target, _ = dropout.resample(np.array([0]), pair, (99, 99), (1, 1))
        assert separate.source.decode(source[0]) == pairs[0][0]
        assert separate.target.decode(target[0]) == pairs[0][1]


def test_capacity() -> None:
    capacity = dropout_capacity(0.1, 50)
    assert capacity.tolist()[:5] == [4, 6, 7, 9, 10]
    assert capacity[20] == 34
    assert capacity.max() == 50
