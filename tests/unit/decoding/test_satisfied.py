"""Constraints that a translation satisfies anyway change nothing; others are satisfied by another search."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch

from econmt.data.text.glossary import Glossary
from econmt.data.text.vocabulary import SPECIAL_TOKENS, Vocabularies, WordVocabulary
from econmt.decoding.constraints.inclusion import contains_all
from econmt.decoding.constraints.phrases import is_of_word
from econmt.decoding.requests import Request
from econmt.decoding.results import merged
from econmt.decoding.search.beam import Hypothesis
from econmt.decoding.search.options import SearchOptions
from econmt.decoding.translation import Translation
from econmt.decoding.translator import Translator
from econmt.model import IncrementalModel
from tests.unit.decoding.test_avoidance import PIECES, Pieces
from tests.unit.decoding.test_real_model import SIZE, VARIANTS, make_model
from tests.unit.decoding.test_translator import data_section

WORDS = [chr(ord("a") + at) for at in range(SIZE - len(SPECIAL_TOKENS))]
BOTH = Vocabularies(*[WordVocabulary([*SPECIAL_TOKENS, *WORDS])] * 2)
LINES = ["a b c", "d", "h g f e d", "b e b", "s r q p o n m", "c c", "k l", "f a d e"]


def translator(variants: Sequence[str], glossary: Glossary | None = None, **options: Any) -> Translator:
    models = [IncrementalModel(make_model(variant, seed)) for seed, variant in enumerate(variants, 4)]
    search = SearchOptions(**{"batch_size": 4, **options})
    return Translator(models, BOTH, search, glossary=glossary, data=data_section(12))


def assert_equal(found: Translation, expected: Translation) -> None:
    """Bit for bit."""
    assert found.source_tokens == expected.source_tokens
    assert len(found.hypotheses) == len(expected.hypotheses)
    for one, other in zip(found.hypotheses, expected.hypotheses, strict=True):
        assert one._replace(attention=None) == other._replace(attention=None)
        assert (one.attention is None) == (other.attention is None)
        if one.attention is not None:
            assert torch.equal(one.attention, other.attention)


def absent_from(texts: Sequence[str]) -> str:
    return next(word for word in WORDS if not any(word in text.split() for text in texts))


BEAMS = cycle((1, 2, 3, 4, 5, 6, 8, 10))
SETTINGS = [
    *[((variant,), beam, {}) for beam, variant in zip(BEAMS, VARIANTS, strict=False)],
    (("additive", "dot"), 3, {}),
    (("additive",), 5, {"nbest_size": 5}),
    (("gnmt",), 3, {"continuous": True}),
    (("dot",), 4, {"attention": False}),
    (("deep",), 3, {"length_penalty_alpha": 0.6, "coverage_penalty_weight": 0.2, "nbest_size": 2}),
    (("additive",), 2, {"block_ngram_repeat": 2}),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("variants", "beam", "options"), SETTINGS, ids=str)
def test_what_is_satisfied_changes_nothing_and_the_rest_is_satisfied(
    variants: Sequence[str], beam: int, options: dict[str, Any]
) -> None:
    draw, settings = random.Random(beam), {"beam_size": beam, **options}
    usual = translator(variants, **settings)
    plain = list(usual.translate(LINES))
    assert any(each.text for each in plain)
    requests, broken = [], []
    for line, each in zip(LINES, plain, strict=True):
        texts = [hypothesis.text for hypothesis in each.hypotheses]
        other, words = absent_from(texts), each.text.split()
        shared = [word for word in words if word in WORDS and all(word in text.split() for text in texts)]
        wanted = [draw.choice(shared)] if shared else []
        requests.append(Request(line, constraints=wanted, avoid=[other, f"{other} {other}"]))
        broken.append(Request(line, constraints=[*wanted, other], avoid=words[:1]))
        if words[:1] == wanted:
            broken[-1] = broken[-1]._replace(avoid=[])
    steered = translator(variants, **settings)
    for found, expected in zip(steered.translate(requests), plain, strict=True):
        assert_equal(found, expected)
    assert steered.searches == usual.searches
    # Lines that fall short leave those beside them alone.
    mixed = [pair[number % 2] for number, pair in enumerate(zip(requests, broken, strict=True))]
    rows = zip(steered.translate(mixed), plain, mixed, strict=True)
    for number, (found, expected, request) in enumerate(rows):
        if number % 2 == 0:
            assert_equal(found, expected)
        for hypothesis in found.hypotheses:
            written = hypothesis.text.split()
            assert all(word in written for word in request.constraints)
            assert not any(word in written for word in request.avoid)


def test_in_lists_what_falls_short_is_replaced_and_the_best_stays() -> None:
    """The best translation is the same whatever the length of the list."""
    beam = 4
    lists = list(translator(["additive"], beam_size=beam, nbest_size=beam).translate(LINES))
    requests = []
    for line, each in zip(LINES, lists, strict=True):
        best = set(each.text.split())
        others = [set(hypothesis.text.split()) - best for hypothesis in each.hypotheses[1:]]
        avoided = next((min(words) for words in others if words), absent_from([each.text]))
        requests.append(Request(line, avoid=[avoided]))
    replaced = 0
    for size in (1, 2, beam):
        found = translator(["additive"], beam_size=beam, nbest_size=size).translate(requests)
        for request, expected, each in zip(requests, lists, found, strict=True):
            assert len(each.hypotheses) == size
            assert each.hypotheses[0].ids == expected.hypotheses[0].ids
            assert each.score == expected.score
            scores = [hypothesis.score for hypothesis in each.hypotheses[1:]]
            assert scores == sorted(scores, reverse=True)
            ids = [tuple(hypothesis.ids) for hypothesis in each.hypotheses]
            assert len({*ids}) == size
            kept = [tuple(one.ids) for one in expected.hypotheses if request.avoid[0] not in one.text.split()]
            assert {*kept} <= {*ids} or size < beam
            replaced += size - len(kept) if size == beam else 0
            assert not any(request.avoid[0] in one.text.split() for one in each.hypotheses)
    assert replaced > 3


def test_of_the_second_search_come_as_many_as_are_missing_and_no_others() -> None:
    def found(*ids: int) -> list[Hypothesis]:
        return [Hypothesis([each], -float(each), -float(each), None, False) for each in ids]

    assert [each.ids for each in merged(found(2, 5), found(1, 2, 3, 4), 4)] == [[2], [1], [3], [5]]
    assert merged(found(2), found(1, 3), 1) == found(2)
    assert merged([], found(1, 3), 4) == found(1, 3)


def test_a_prefix_is_part_of_the_first_search() -> None:
    """Constraints that the translation with the prefix satisfies do not change it, within the prefix or behind."""
    requests = [Request(line, target_prefix="c a") for line in LINES]
    begun = list(translator(["additive"], beam_size=4).translate(requests))
    steered = []
    for request, each in zip(requests, begun, strict=True):
        words = each.text.split()
        assert words[:2] == ["c", "a"]
        last = [word for word in words[-1:] if word in WORDS and len(words) > 3]
        steered.append(request._replace(constraints=["c", *last], avoid=[absent_from([each.text])]))
    steered[0] = steered[0]._replace(constraints=["a c"])
    avoided = next(word for word in begun[1].text.split() if word not in ("c", "a"))
    steered[1] = steered[1]._replace(constraints=[], avoid=[avoided])
    found = list(translator(["additive"], beam_size=4).translate(steered))
    for each, expected in zip(found[2:], begun[2:], strict=True):
        assert_equal(each, expected)
    assert [each.text.split()[:2] for each in found] == [["c", "a"]] * len(LINES)
    assert "a c" in found[0].text
    assert avoided not in found[1].text.split()


@pytest.mark.parametrize("long_lines", ["cut", "skip"])
def test_terms_behind_the_cut_of_a_long_line_are_cut_off_with_it(long_lines: str) -> None:
    options = {"beam_size": 2, "max_input_length": 3, "long_lines": long_lines}
    lines = ["a b d e", "d e d a b c d", "a b c"]
    plain = list(translator(["additive"], **options).translate(lines))
    terms = Glossary({"e": "q q"})
    found = list(translator(["additive"], terms, **options).translate(lines))
    assert_equal(found[0], plain[0])
    assert_equal(found[2], plain[2])
    assert found[1].text.count("q q") == (long_lines == "cut")


PIECE_VOCABULARY = Pieces(PIECES)


def spans_of(text: str, phrase: str) -> list[range]:
    """Places of a phrase across whose ends no word goes on."""
    found = []
    for match in re.finditer(f"(?={re.escape(phrase)})", text):
        begin, end = match.start(), match.start() + len(phrase)
        inside = [at for at in (begin, end) if 0 < at < len(text)]
        if not any(is_of_word(text[at - 1]) and is_of_word(text[at]) for at in inside):
            found.append(range(begin, end))
    return found


def have_places(text: str, phrases: Sequence[str]) -> bool:
    """Whether the phrases have places of their own, by trying all."""
    for spans in product(*(spans_of(text, phrase) for phrase in phrases)):
        places = [place for span in spans for place in span]
        if len({*places}) == len(places):
            return True
    return False


def test_a_translation_is_judged_as_text() -> None:
    """Random texts of subwords against all ways to place one to three phrases in them."""
    draw, seen = random.Random(4), {True: 0, False: 0}
    choice = ["a", "ab", "a b", "b", ".", "(a", "b)", "狗", "狗猫", "a.", "c", "ab c", "猫"]
    for _ in range(3000):
        ids = [draw.randrange(4, PIECE_VOCABULARY.size) for _ in range(draw.randint(1, 7))]
        text = " ".join(PIECE_VOCABULARY.decode(ids).split())
        phrases = [draw.choice(choice) for _ in range(draw.randint(1, 3))]
        expected = have_places(text, phrases)
        assert contains_all(text, phrases) == expected, (text, phrases)
        seen[expected] += 1
    assert min(seen.values()) > 200
    assert contains_all("", [])
    assert not contains_all("", ["a"])
