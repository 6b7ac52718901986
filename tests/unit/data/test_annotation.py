"""Training sources with annotated terms: where they come from, what is written, and capitals of letters i."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from econmt.cli.prepare import report
from econmt.config.recipe import Noise, Recipe
from econmt.data.batching.noise import TITLE, UPPER, NoiseMaker, changed_text
from econmt.data.batching.store import PreparedData, prepare
from econmt.data.text.annotation import (
    MOST_TERMS,
    AlignedTerms,
    GlossaryTerms,
    annotate,
    draw_terms,
    term_tag_ids,
)
from econmt.data.text.case import folded, lower, upper
from econmt.data.text.glossary import Glossary, Occurrence, occurrences
from econmt.decoding.terms import annotated_source, plain_source
from tests.unit.data.conftest import made_up_pairs, write_pairs

SENTENCE = "(The hot dog), a dog."
Prepare = Callable[..., PreparedData]
TERMS = [Occurrence("Wurst", 5, 12), Occurrence("Hund", 17, 20)]


def test_a_term_is_replaced_by_its_translation_between_tags() -> None:
    for sentence, terms, annotated in (
        (SENTENCE, TERMS, "(The <term> Wurst </term>), a <term> Hund </term>."),
        ("dog", [Occurrence("Hund", 0, 3)], "<term> Hund </term>"),
        ("(dog)", [Occurrence("Hund", 1, 4)], "( <term> Hund </term>)"),
        (SENTENCE, [], SENTENCE),
    ):
        assert annotate(sentence, terms).text == annotated
    terms = GlossaryTerms(Glossary({"dog": "Hund", "hot dog": "heiße Wurst"}))
    draw = random.Random(1)
    assert [each.target for each in terms.of("a dog", "der Hund", draw)] == ["Hund"]
    assert terms.of("a dog", "die Hunde", draw) == []
    assert terms.of("a hot dog", "heiße rote Wurst", draw) == []
    assert [each.target for each in terms.of("a hot dog", "die heiße Wurst!", draw)] == ["heiße Wurst"]


def test_each_character_of_an_annotated_sentence_stands_for_some_of_the_sentence() -> None:
    annotation = annotate(SENTENCE, TERMS)
    assert len(annotation.origins) == len(annotation.text)
    for character, (start, end) in zip(annotation.text, annotation.origins, strict=True):
        assert (end == start + 1 and SENTENCE[start] == character) or (start, end) in ((5, 12), (17, 20))
    for (start, end), term in zip(annotation.spans, TERMS, strict=True):
        inside = annotation.text[start:end]
        assert inside.startswith(" <term>")
        assert inside.endswith("</term>")
        covered = {place for origin in annotation.origins[start:end] for place in range(*origin)}
        assert covered == set(range(term.start, term.end))


def dictionary_pairs(count: int) -> list[tuple[str, str]]:
    """Makes pairs whose words translate one by one: word n by WORDn, in the same order, after an article."""
    draw = random.Random(5)
    chosen = [draw.sample(range(40), draw.randint(2, 5)) for _ in range(count)]
    names = [chr(97 + number // 10) + chr(97 + number % 10) * 2 for number in range(40)]
    return [
        (f"the {' '.join(names[n] for n in row)}.", f"das {' '.join(names[n].upper() for n in row)}.")
        for row in chosen
    ]


def test_aligned_words_are_terms_and_frequent_ones_are_not() -> None:
    pairs = dictionary_pairs(120)
    terms = AlignedTerms(lambda: iter(pairs))
    sizes, counts = Counter[int](), Counter[int]()
    for number, (source, target) in enumerate(pairs):
        found = terms.of(source, target, random.Random(number))
        counts[len(found)] += 1
        for before, after in itertools.pairwise(found):
            assert before.end <= after.start
        for each in found:
            assert source[each.start : each.end].upper() == each.target
            assert "the" not in source[each.start : each.end].split()
            sizes[len(each.target.split())] += 1
    # One to three terms are drawn, of which overlapping ones are dropped; three words in ten are joined by the next one.
    assert counts == {1: 49, 2: 55, 3: 16}
    assert sizes == {1: 171, 2: 31, 3: 5}


@pytest.mark.parametrize("side", [0, 1])
def test_a_term_goes_on_with_words_only(side: int) -> None:
    """A number that is aligned with a word neither begins a term nor continues one."""
    number = re.compile("(?i)a([a-j])\\1")
    pairs = []
    for pair in dictionary_pairs(180):
        texts = [*pair]
        texts[side] = number.sub(lambda word: str(ord(word[1].lower()) - ord("a")), texts[side])
        pairs.append((texts[0], texts[1]))
    terms = AlignedTerms(lambda: iter(pairs))
    assert terms._translations["3" if side == 0 else "add"] == {"add" if side == 0 else "3"}
    found = [
        (source[each.start : each.end], each.target)
        for count, (source, target) in enumerate(pairs)
        for each in terms.of(source, target, random.Random(count))
    ]
    assert not [each for each in found if re.search("[0-9]", each[side])]
    assert Counter(len(each[1 - side].split()) for each in found) == {1: 229, 2: 33, 3: 2}


def test_a_term_has_three_words_at_most_aligned_one_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt.data.text.annotation._LONGER", 1.0)
    pairs = dictionary_pairs(120)
    terms = AlignedTerms(lambda: iter(pairs))
    found = [each for pair in pairs for each in terms.of(*pair, random.Random(1))]
    sizes = Counter(len(each.target.split()) for each in found)
    assert (max(sizes), sizes[3]) == (3, 65)
    # Either of two likely translations is aligned; where both or two sources are there, none is.
    pairs = [("bank", "Ufer")] * 5 + [("bank", "Bank")] * 6
    terms = AlignedTerms(lambda: iter(pairs))
    for target in ("Ufer", "Bank"):
        assert terms.of("the bank", f"das {target}", random.Random(1)) == [Occurrence(target, 4, 8)]
    assert terms.of("bank", "Ufer Bank", random.Random(1)) == []
    assert terms.of("bank bank", "Ufer", random.Random(1)) == []


def test_words_of_a_certain_frequency_are_terms() -> None:
    """A word that occurs once or more than twenty times in a short text is none, on either side."""

    def terms_of(counts: dict[str, int], side: int) -> set[str]:
        rows = [word for word, count in counts.items() for _ in range(count)]
        pairs = [(word, word.upper()) for word in rows] + [("the the", "das das")] * 20
        if side:
            pairs = [(target, source) for source, target in pairs]
        terms = AlignedTerms(lambda: iter(pairs))
        found = [terms.of(*pair, random.Random(1)) for pair in pairs[: len(rows)]]
        return {each.target.lower() for own in found for each in own}

    for side in (0, 1):
        assert terms_of({"once": 1, "twice": 2, "often": 20, "always": 21}, side) == {"twice", "often"}


def test_the_share_of_annotated_pairs_and_who_finds_their_terms() -> None:
    terms = GlossaryTerms(Glossary({"dog": "Hund", "BT": "BT"}))
    pair = "<BT> a dog", "BT ein Hund"
    drawn = [draw_terms(terms, 0.25, number, pair, "<BT>") for number in range(2000)]
    assert drawn == [draw_terms(terms, 0.25, number, pair, "<BT>") for number in range(2000)]
    assert {each.target for found in drawn for each in found} == {"Hund"}
    assert sum(map(bool, drawn)) == pytest.approx(500, abs=60)
    many = "dog " * 8, "Hund"
    assert len(draw_terms(terms, 1.0, 1, many, "")) == MOST_TERMS
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


SUBWORDS = {"type": "bpe", "size": 60, "joint": True}


@pytest.fixture
def run(tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Prepares text of which a term of the glossary is in every pair."""
    monkeypatch.setattr("econmt.data.batching.split_writer._BLOCK_PAIRS", 7)
    pairs = [(f"a dog {source}", f"{target} der Hund") for source, target in made_up_pairs(60)]
    write_pairs(tmp_path / "corpus", "train", pairs)
    for name in ("valid", "test"):
        write_pairs(tmp_path / "corpus", name, pairs[:5])
    (tmp_path / "corpus" / "terms").write_text("# mine\ndog = Hund\n", encoding="utf-8")

    def run(share: float = 0.5, **changes: object) -> PreparedData:
        recipe = make_recipe(
            annotate_terms={"share": share, "glossary": "terms"}, subwords=SUBWORDS, **changes
        )
        return prepare(recipe, tmp_path / "store", [tmp_path / "corpus"], show_progress=False)

    return run


def test_training_sources_are_annotated_and_others_are_not(
    run: Prepare, make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = run()
    source = prepared.vocabularies.source
    texts = [source.decode(prepared.train.pair(n)[0].tolist()) for n in range(60)]
    annotated = [number for number, text in enumerate(texts) if text.startswith("a <term> Hund </term> ")]
    assert annotated == [number for number in range(60) if random.Random(number).random() < 0.5]
    count = len(annotated)
    assert prepared.statistics["train"]["annotated"] == count
    settings = {"share": 0.5, "glossary": "terms"}
    told = report(make_recipe(annotate_terms=settings, subwords=SUBWORDS), prepared)
    assert f"terms       annotated in {count} of 60 training pairs" in told
    assert all(text.startswith("a dog ") for text in texts if "<" not in text)
    assert sum("<" in text for text in texts) == count
    for store in (prepared.valid, prepared.test):
        assert not {*term_tag_ids(source)} & {int(i) for n in range(5) for i in store.pair(n)[0]}
    capsys.readouterr()
    run()
    assert "again" not in capsys.readouterr().err
    (tmp_path / "corpus" / "terms").write_text("a dog = Hund\n", encoding="utf-8")
    assert run().statistics["train"]["annotated"]
    assert f"{tmp_path / 'corpus' / 'terms'} has changed" in capsys.readouterr().err


def test_a_pair_that_would_be_too_long_is_not_annotated(run: Prepare) -> None:
    longest = 22
    prepared = run(share=0.99, max_length=longest)
    tags = {*term_tag_ids(prepared.vocabularies.source)}
    lengths = {True: [0], False: [0]}
    for number in range(len(prepared.train)):
        ids = prepared.train.pair(number)[0].tolist()
        lengths[bool(tags & {*ids})].append(len(ids))
    assert max(lengths[True]) == longest
    assert max(lengths[False]) > longest - 10


def test_noise_leaves_annotated_pairs_unchanged(run: Prepare) -> None:
    prepared = run()
    maker = NoiseMaker(Noise(upper=0.5), prepared.vocabularies, [], prepared.train)
    chosen = np.arange(len(prepared.train))
    before = prepared.train.gather(chosen)
    after = maker.apply(np.full(len(chosen), UPPER, np.uint8), chosen, before, (200, 200), (1, 1))
    tags = {*term_tag_ids(prepared.vocabularies.source)}
    same = [old == new for old, new in zip(before.lists()[0], after.lists()[0], strict=True)]
    annotated = [bool(tags & {*ids}) for ids in before.lists()[0]]
    assert all(kept for kept, has_tags in zip(same, annotated, strict=True) if has_tags)
    assert not any(same[at] for at, has_tags in enumerate(annotated) if not has_tags and after.lists()[0][at])


def test_attention_over_an_annotated_source_becomes_attention_over_the_sentence(run: Prepare) -> None:
    source = run().vocabularies.source
    terms = [Occurrence("Hund", 2, 5)]
    found = annotated_source("a dog de ☃ mo.", terms, source)
    assert found.text == "a <term> Hund </term> de ☃ mo."
    annotated, sentence = source.encode(found.text), source.encode("a dog de ☃ mo.")
    assert found.attention.shape == (len(annotated) + 1, len(sentence) + 1)
    torch.testing.assert_close(found.attention.sum(dim=1), torch.ones(len(annotated) + 1))
    first, end = found.spans[0][0], found.spans[0][-1] + 1
    assert source.tokens(annotated)[first:end] == source.tokens(source.encode("<term> Hund </term>"))
    plain = plain_source("a dog de ☃ mo.", terms, source, 50).spans[0]
    assert source.tokens([sentence[at] for at in plain]) == source.tokens(source.encode("dog"))
    longer = [Occurrence("Hund", 2, 8)]
    kept = [plain_source("a dog de ☃ mo.", longer, source, most).spans for most in (plain[0] + 1, 50)]
    assert [len(spans) for spans in kept] == [0, 1], "whole or not at all"
    weights = found.attention
    assert (weights[first:end, list(plain)].sum(dim=1) == 1.0).all()
    # The tokens before and after the term are the same ones, one by one.
    assert torch.equal(weights[:first, :first], torch.eye(first))
    rest = torch.eye(len(annotated) + 1 - end)
    blank = source.tokens(annotated[end:]).index("▁")
    rest[blank] = rest[blank + 1]  # a blank before an unknown character is a token without a character
    assert torch.equal(weights[end:, -len(rest) :], rest)


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
