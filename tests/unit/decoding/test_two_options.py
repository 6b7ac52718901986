"""Constraints together: with one another and with the options of a search, against all translations of a toy model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from econmt.data.text.glossary import Glossary, occurrences
from econmt.data.text.vocabulary import UNK, WORD_START
from econmt.decoding.constraints.avoidance import Avoidance
from econmt.decoding.constraints.batch import DecodingConstraints
from econmt.decoding.constraints.inclusion import Phrase
from econmt.decoding.constraints.phrases import Spelling
from tests.unit.decoding.test_avoidance import VOCABULARY, Pieces, is_ruled_out, occurs, repeats
from tests.unit.decoding.test_constraints import holds
from tests.unit.decoding.toy import LIMIT, ToyModel, assert_figures, everything, judged, search

TOY = Pieces([f"{WORD_START}a", "b"])
SPELLING = Spelling(TOY)
"""Token 4 begins a word, token 5 continues one, as ``JOINS`` of the tests of constraints has it."""
AVOIDED = [[["ab"]], [["a"]], [["a a"], ["ab a"]], [["abb"], ["a ab"]], [["aba", "a a"]]]
PHRASES: list[tuple[Phrase, ...]] = [
    (),
    (Phrase((4,), True),),
    (Phrase((4, 5), True),),
    (Phrase((4,), True), Phrase((4, 5), True)),
    (Phrase((4, 4), True), Phrase((UNK,), False)),
]
REPEATED: list[tuple[Phrase, ...]] = [
    (Phrase((4,), False),) * 3,
    (Phrase((4, 5), False), Phrase((5, 4), False)),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"length_penalty_alpha": 0.0, "unk_penalty": 0.7},
    {"word_penalty": 0.5, "min_output_length": 3},
    {"repetition_penalty": 1.8, "length_penalty_alpha": 0.3},
]


WantedCase = tuple[tuple[Phrase, ...], tuple[int, ...], list[list[str]]]
"""Phrases, a prefix, and lists of avoided phrases."""


def constraints_of(cases: Sequence[WantedCase]) -> list[DecodingConstraints]:
    return [
        DecodingConstraints(phrases, prefix, tuple(Avoidance(each, SPELLING) for each in lists))
        for phrases, prefix, lists in cases
    ]


def contains_avoided(ids: Sequence[int], lists: Sequence[list[str]]) -> bool:
    # An unknown word is a word of its own, but no letter.
    text = TOY.decode(ids).replace("<unk>", "|")
    return any(occurs(text, phrase) for phrases in lists for phrase in phrases)


def combinations(choices: Sequence[tuple[Phrase, ...]] = PHRASES) -> Iterator[WantedCase]:
    """Yields phrases, prefixes and avoided phrases that do not contradict each other."""
    for phrases, prefix, lists in product(choices, [(), (4,), (UNK, 4), (5, 5)], [*AVOIDED, []]):
        needed = len(prefix) + sum(len(phrase.ids) for phrase in phrases)
        written = (prefix, *(phrase.ids for phrase in phrases))
        contradict = any(contains_avoided(ids, lists) for ids in written)
        # Near the longest output a search keeps room for a word that is avoided unless it goes on, also where the
        # phrase goes on with it.
        double = prefix[-1:] == (4,) and (4, 5) in [phrase.ids for phrase in phrases] and ["a a"] in lists
        if needed <= LIMIT and not contradict and not double:
            yield phrases, prefix, lists


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_phrases_prefixes_and_avoided_phrases_together(options: dict[str, Any]) -> None:
    """A wide beam finds the best translations that satisfy all of them, with their scores."""
    model = ToyModel(5, end_bias=1.0)
    figures = {ids: judged(model, 0, ids, **options) for ids in everything()}
    every = sorted(((*each, ids) for ids, each in figures.items() if each is not None), reverse=True)
    cases, best = [], []
    for case in combinations([*PHRASES, *REPEATED]):
        phrases, prefix, lists = case
        begun = [each for each in every if each[2][: len(prefix)] == prefix and holds(each[2], phrases)]
        expected = [each for each in begun if not contains_avoided(each[2], lists)][:3]
        if len(expected) == 3:
            cases.append(case)
            best.append(expected)
    assert len(cases) > 40
    constraints = constraints_of(cases)
    sizes = {"beam_size": 130, "nbest_size": 3, "attention": False}
    found = search(model, [0] * len(cases), constraints=constraints, **sizes, **options)
    for hypotheses, expected in zip(found, best, strict=True):
        assert_figures(hypotheses, expected)


@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_all_hold_in_narrow_beams_and_batches(beam_size: int) -> None:
    """Sentences with other constraints stand beside each other; n-grams do not come twice where nothing asks for it."""
    cases = [case for case in combinations() if any(case)]
    draw = random.Random(beam_size)
    options = {"beam_size": beam_size, "nbest_size": beam_size, "block_ngram_repeat": 3}
    for limit in (3, 4, 5, 5, 9):
        chosen = draw.sample(cases, 8)
        constraints = constraints_of(chosen)
        model = ToyModel(draw.randrange(100), end_bias=-1.0)
        found = search(model, range(8), limit, constraints=constraints, **options)
        for (phrases, prefix, lists), hypotheses in zip(chosen, found, strict=True):
            assert hypotheses
            for each in hypotheses:
                assert holds(each.ids, phrases), (phrases, each.ids)
                assert tuple(each.ids[: len(prefix)]) == prefix
                # A greedy search may find at its last token that the phrases leave nothing else.
                if beam_size > 1 or not each.cut:
                    assert not contains_avoided(each.ids, lists), (lists, each.ids)
                if not phrases and not prefix:
                    assert not repeats(each.ids, 3)
        model = ToyModel(end_bias=-1.0)
        (alone,) = search(model, [0], limit, constraints=constraints[:1], **options)
        together = search(model, range(8), limit, constraints=constraints, **options)
        assert [each.ids for each in alone] == [each.ids for each in together[0]]


def test_every_short_text_of_overlapping_phrases() -> None:
    """All texts of up to five of the tokens that the phrases are made of: phrases end where others are under way."""
    spelling = Spelling(VOCABULARY)
    joins = spelling.joins.tolist()
    pieces = VOCABULARY.tokens(range(VOCABULARY.size))
    tokens = [pieces.index(piece) for piece in (f"{WORD_START}a", "b", ")")]
    lists = ["a ab", "ab a"], ["a a ab", "a ab)"], ["a)", ") a)"], ["ab", "a a b"], ["abb", "ab a", ")"]
    for phrases in lists:
        avoidance = Avoidance(phrases, spelling)
        for length in range(1, 6):
            for ids in product(tokens, repeat=length):
                wrong = any(occurs(VOCABULARY.decode(ids), phrase) for phrase in phrases)
                assert is_ruled_out(avoidance, joins, ids) == wrong, (phrases, VOCABULARY.decode(ids))
                assert avoidance.is_in(ids) == wrong
                # What goes on behind an avoided phrase is of no interest.
                begun = any(is_ruled_out(avoidance, joins, ids[:end]) for end in range(1, length))
                if not begun and not wrong:
                    assert not avoidance.is_in(ids, goes_on=True)


def test_terms_of_two_glossaries_that_touch_or_overlap() -> None:
    """A term of the second glossary counts unless it shares a character with one of the first."""
    draw, touching = random.Random(1), 0
    words = ["狗", "猫", "走", "狗猫", "猫走", "a", "b", "a b", "b-a", ".", "a."]
    for _ in range(300):
        own, general = (
            Glossary({word: f"{word}{side}" for word in draw.sample(words, 4)}) for side in (1, 2)
        )
        text = "".join(draw.choice(["狗", "猫", "走", "a", " b", "-", ".", " "]) for _ in range(8))
        first, second = own.occurrences(text), general.occurrences(text)
        taken = {at for each in first for at in range(each.start, each.end)}
        expected = first + [each for each in second if not taken & {*range(each.start, each.end)}]
        found = occurrences(text, [own, general])
        assert found == sorted(expected, key=lambda each: each.start), text
        assert occurrences(text, []) == []
        touching += sum(one.end == other.start for one in first for other in second)
        touching += sum(one.start == other.end for one in first for other in second)
    assert touching > 50
    found = occurrences("狗猫狗", [Glossary({"猫": "cat"}), Glossary({"狗": "dog"})])
    assert [each.target for each in found] == ["dog", "cat", "dog"]
