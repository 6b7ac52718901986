"""Avoided phrases against the text that tokens make, however they cut it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
import torch

from econmt.data.text.glossary import units
from econmt.data.text.vocabulary import SPECIAL_TOKENS, UNK, WORD_START, Vocabulary, WordVocabulary
from econmt.decoding.constraints.avoidance import START, Avoidance
from econmt.decoding.constraints.batch import DecodingConstraints
from econmt.decoding.constraints.inclusion import Phrase
from econmt.decoding.constraints.phrases import Spelling, is_of_word
from tests.unit.decoding.toy import ToyModel, search


class Pieces(Vocabulary):
    """A vocabulary of given subwords."""

    of_pieces = True

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = [*SPECIAL_TOKENS, *pieces]
        self.size = len(self._pieces)

    def encode(self, text: str) -> list[int]:
        raise AssertionError

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        raise AssertionError

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.tokens(ids)).replace(WORD_START, " ")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._pieces[i] for i in ids]


PIECES = [f"{WORD_START}{word}" for word in ("", "a", "ab", "b", "c", "(", "(a", "狗")] + [
    *("a", "b", "c", "ab", "abc", ")", ".", "a.", ".b", "狗", "猫", "狗猫")
]
VOCABULARY = Pieces(PIECES)


def occurs(text: str, phrase: str) -> bool:
    """Whether a phrase is in a text, its first and last words not parts of longer ones."""
    before = "(?<![abc])" if is_of_word(phrase[0]) else ""
    after = "(?![abc])" if is_of_word(phrase[-1]) else ""
    return re.search(before + re.escape(phrase) + after, text) is not None


def is_ruled_out(avoidance: Avoidance, joins: Sequence[bool], ids: Sequence[int]) -> bool:
    """Whether a search would have let these tokens pass, the end behind them."""
    reached = START
    for token in ids:
        moves = avoidance.moves(reached)
        if token in moves.masked or (moves.only_joining and not joins[token]):
            return True
        reached = avoidance.after(reached, token)
        assert avoidance.moves(reached).only_joining == (token in moves.risky)
    return avoidance.moves(reached).only_joining


@pytest.mark.parametrize(
    "phrases", [["a"], ["ab"], ["a b"], ["."], ["狗"], ["狗猫"], ["a", "ab c"], ["(a"], ["b)"], ["a  b"]]
)
def test_what_is_ruled_out_is_what_would_write_a_phrase(phrases: list[str]) -> None:
    spelling = Spelling(VOCABULARY)
    avoidance, joins = Avoidance(phrases, spelling), spelling.joins.tolist()
    draw = random.Random(len(phrases[0]))
    seen = {True: 0, False: 0}
    for _ in range(1500):
        ids = [draw.randrange(4, VOCABULARY.size) for _ in range(draw.randint(1, 4))]
        wrong = any(occurs(VOCABULARY.decode(ids), phrase.replace("  ", " ")) for phrase in phrases)
        assert is_ruled_out(avoidance, joins, ids) == wrong, VOCABULARY.tokens(ids)
        seen[wrong] += 1
    assert min(seen.values()) > 10


def test_words_are_ruled_out_at_once() -> None:
    spelling = Spelling(WordVocabulary([*SPECIAL_TOKENS, "a", "b", "ab"]))
    avoidance = Avoidance(["b a"], spelling)
    reached = avoidance.after(START, 5)
    assert avoidance.moves(reached).masked.tolist() == [4]
    assert avoidance.moves(reached).risky.tolist() == []
    assert avoidance.moves(avoidance.after(START, 6)).masked.tolist() == []


@pytest.mark.parametrize("vocabulary", [WordVocabulary([*SPECIAL_TOKENS, "a", "b"]), VOCABULARY])
def test_the_token_of_unknown_words_can_be_avoided(vocabulary: WordVocabulary | Pieces) -> None:
    avoidance = Avoidance(["<unk>", "a b"], Spelling(vocabulary))
    reached = START
    for token in (4, 5, 4):
        assert UNK in avoidance.moves(reached).masked.tolist()
        reached = avoidance.after(reached, token)
    assert UNK in avoidance.moves(reached).masked.tolist()
    assert avoidance.is_in([5, UNK])
    assert not avoidance.is_in([5])
    assert UNK not in Avoidance(["a b"], Spelling(vocabulary)).moves(START).masked.tolist()


def test_units_are_words_and_signs() -> None:
    assert units("Ein  Hund-Haus, 12%") == ["Ein", "Hund", "-", "Haus", ",", "12", "%"]
    assert units("我是Kim。") == ["我", "是", "Kim", "。"]


def test_hypotheses_that_need_a_word_to_go_on_do_not_fill_the_beam() -> None:
    class Alike(ToyModel):
        """The avoided word is by far the most probable one, and hardly ever goes on."""

        def table(self, sentence: int, prefix: int) -> torch.Tensor:
            logits = torch.tensor([0.0, 0.0, 0.0, 2.0, 5.0, -9.0, 3.0])
            return logits.log_softmax(dim=0)

        size = 7

    vocabulary = Pieces([f"{WORD_START}a", "b", f"{WORD_START}c"])
    spelling = Spelling(vocabulary)
    for beam_size in (1, 2, 4):
        constraints = [DecodingConstraints(avoidances=(Avoidance(["a"], spelling),))]
        ((found,),) = search(
            Alike(), [0], 6, constraints=constraints, joins=spelling.joins, beam_size=beam_size
        )
        assert set(found.ids) <= {6}, found.ids


@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_an_avoided_word_is_not_begun_where_constraints_leave_it_no_room_to_go_on(beam_size: int) -> None:
    vocabulary = Pieces([f"{WORD_START}a", "b", f"{WORD_START}c"])
    spelling = Spelling(vocabulary)
    options = {"joins": spelling.joins, "beam_size": beam_size, "nbest_size": beam_size}
    for seed in range(12):
        model = ToyModel(seed, end_bias=-3.0)
        model.size = vocabulary.size
        constraints = DecodingConstraints((Phrase((6, 6), True),), avoidances=(Avoidance(["a"], spelling),))
        (found,) = search(model, [0], constraints=[constraints], **options)
        for hypothesis in found:
            text = vocabulary.decode(hypothesis.ids)
            assert "c c" in text
            assert not occurs(text.replace("<unk>", " "), "a"), text


def test_no_n_gram_comes_twice() -> None:
    for width in (1, 2, 3):
        model, free = ToyModel(1, end_bias=-4.0), [DecodingConstraints()] * 4
        found = search(
            model, range(4), 12, constraints=free, beam_size=3, nbest_size=3, block_ngram_repeat=width
        )
        for hypotheses in found:
            assert hypotheses
            assert not any(repeats(hypothesis.ids, width) for hypothesis in hypotheses)
        plain = search(model, range(4), 12, beam_size=3)
        assert any(repeats(hypotheses[0].ids, width) for hypotheses in plain)


def repeats(ids: Sequence[int], width: int) -> bool:
    """Whether an n-gram comes twice."""
    grams = [tuple(ids[at : at + width]) for at in range(len(ids) - width + 1)]
    return len(grams) > len(set(grams))
