"""Capitals of languages with two letters i."""

from __future__ import annotations

import random

import numpy as np
import pytest

from econmt.data.batching.noise import TITLE, UPPER, changed_text
from econmt.data.text.annotation import AlignedTerms, GlossaryTerms
from econmt.data.text.case import folded, lower, upper
from econmt.data.text.glossary import Glossary, occurrences


@pytest.mark.parametrize("language", ["tr", "tr-TR", "tr_TR", "az", "AZ-Latn", "aze"])
def test_a_dot_stays_where_it_is(language: str) -> None:
    assert lower("IŞIK İZMİR", language) == "ışık izmir"
    assert upper("ışık izmir", language) == "IŞIK İZMİR"
    assert lower("I\u0307", language) == "i"
    assert folded("IŞIK", language) == folded("ışık", language) != folded("işik", language)
    assert folded("İzmir", language) == folded("izmir", language) == folded("İZMİR", language)


@pytest.mark.parametrize("language", ["", "en", "de", "trx", "kaz", "x-tr"])
def test_other_languages_have_one_letter(language: str) -> None:
    for text in ("IŞIK İZMİR", "ışık izmir", "Straße", "ΣΑΣ"):
        assert lower(text, language) == text.lower()
        assert upper(text, language) == text.upper()
        assert folded(text, language) == text.casefold()


def test_the_source_language_finds_the_terms_of_a_glossary() -> None:
    glossary = Glossary({"ışık": "light", "izmir": "Izmir", "İş": "Work"})
    text = "IŞIK İZMİR İŞ İş iş Isik"
    found = [(each.target, each.start, each.end) for each in glossary.occurrences(text, "tr")]
    assert found == [("light", 0, 4), ("Izmir", 5, 10), ("Work", 14, 16)]
    assert occurrences(text, [glossary], "tr") == glossary.occurrences(text, "tr")
    # Without a language I is the capital of i.
    found = Glossary({"isik": "x", "ISIK": "y"}).occurrences("Isik ISIK")
    assert [each.target for each in found] == ["x", "y"]
    assert Glossary({"isik": "x"}).occurrences("ISIK", "tr") == []
    (term,) = GlossaryTerms(glossary, "tr").of("IŞIK", "light", random.Random(1))
    assert term.target == "light"
    assert GlossaryTerms(glossary).of("IŞIK", "light", random.Random(1)) == []


def test_aligned_words_differ_in_case_only_by_the_rules_of_their_languages() -> None:
    """The word is aligned only if its spellings are one word."""
    pairs = [("ışık a", "light b"), ("IŞIK c", "LIGHT d")] * 3
    drawn = [
        AlignedTerms(lambda: iter(pairs), languages).of("IŞIK", "light", random.Random(1))
        for languages in (("tr", "en"), ("en", "tr"))
    ]
    assert [[each.target for each in terms] for terms in drawn] == [["light"], []]


def test_noise_writes_the_capitals_of_the_languages() -> None:
    draw = np.random.Generator(np.random.PCG64(1))
    assert changed_text(UPPER, "iki ışık", "big city", draw, ("tr", "en")) == ("İKİ IŞIK", "BIG CITY")
    assert changed_text(TITLE, "big inn", "iki ışık", draw, ("en", "az")) == ("Big Inn", "İki Işık")
