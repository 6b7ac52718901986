"""Filters leave out what they say, before a vocabulary is learnt, and the report says which pairs and why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from econmt.config.recipe import Recipe
from econmt.data.batching.store import PreparedData, open_prepared, prepare
from econmt.data.text.filters import LeftOut, Selection, repeats, report_lines, words_of
from econmt.errors import InputError
from tests.unit.data.conftest import made_up_pairs, write_pairs

Make = Callable[..., Recipe]
Kept = Callable[..., tuple[list[int], PreparedData]]


def prepared(recipe: Recipe, folder: Path) -> PreparedData:
    return prepare(recipe, Path("store"), [folder], show_progress=False)


@pytest.fixture
def kept(corpus: Path, make_recipe: Make) -> Kept:
    """Lines of the training text that are left, of 8 pairs worth a filter and 40 that are not, and the store."""
    plain = [pair for pair in made_up_pairs(60, seed=4) if len(pair[0]) > 8 < len(pair[1])][:40]
    first = [
        ("ba de li mo", "ba de li mo"),  # 1: identical
        ("ba", "de li mo nu ra vi zo ba de"),  # 2: few words, ratio
        ("ba de li", "nu ra vi"),  # 3
        ("ba de li", "zo zo zo"),  # 4: the source again
        ("mo mo mo", "nu ra vi"),  # 5: the target again
        ("ba  de li ", "nu ra vi"),  # 6: the pair again, but for blanks
        ("li " * 30, "li " * 29),  # 7: many words
        ("QQQ ba", "WWWWWWWWW de"),  # 8: twice as long, and only here these letters
    ]
    write_pairs(corpus, "train", first + plain)

    def run(**filters: object) -> tuple[list[int], PreparedData]:
        found = prepared(make_recipe(filters=filters, empty_lines="skip", subwords={"type": "words"}), corpus)
        lines = [int(found.train.location(index).rpartition(":")[2]) for index in range(len(found.train))]
        assert lines[-1] == 48
        return [line for line in lines if line <= 8], found

    return run


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"identical": "drop"}, [2, 3, 4, 5, 6, 7, 8]),
        ({"min_words": 2}, [1, 3, 4, 5, 6, 7, 8]),
        ({"max_words": 29}, [1, 2, 3, 4, 5, 6, 8]),
        ({"max_length_ratio": 2.0}, [1, 3, 4, 5, 6, 7, 8]),
        ({"max_length_ratio": 1.99}, [1, 3, 4, 5, 6, 7]),
        ({"max_repeats": 2}, [1, 2, 3, 6, 8]),
        ({"max_length_ratio": 13.0, "max_repeats": 30, "max_words": 30, "min_words": 1}, [*range(1, 9)]),
        ({"max_repeats": 3}, [1, 2, 3, 4, 5, 6, 8]),
        ({"duplicates": "pairs"}, [1, 2, 3, 4, 5, 7, 8]),
        ({"duplicates": "source"}, [1, 2, 3, 5, 7, 8]),
        ({"duplicates": "target"}, [1, 2, 3, 4, 7, 8]),
        ({"min_words": 3, "duplicates": "target", "identical": "drop"}, [3, 4, 7]),
    ],
)
def test_what_is_left(kept: Kept, filters: dict[str, object], left: list[int]) -> None:
    lines, store = kept(**filters)
    assert lines == left
    counts = store.statistics["train"]
    reasons = ["few_words", "many_words", "ratio", "repeats", "identical", "duplicate"]
    assert counts["pairs"] + sum(counts.get(name, 0) for name in reasons) == counts["lines"] == 48


def test_what_is_left_is_learnt_from_and_the_rest_reported(kept: Kept) -> None:
    everything, less = kept()[1].vocabularies, kept(min_words=3)[1].vocabularies
    assert everything.source.decode(everything.source.encode("QQQ")) == "QQQ"
    assert less.source.decode(less.source.encode("QQQ")) == "<unk>"
    _, store = kept(duplicates="target", identical="drop", max_length_ratio=2.5)
    lines = report_lines(store.folder)
    assert lines[0].split() == ["left", "out", "share", "training", "pairs"]
    assert "           2   4.17 %  where the target came before" in lines
    place = next(i for i, line in enumerate(lines) if "with the same text" in line)
    assert lines[place + 1].endswith("train.en:1")
    assert [line.strip() for line in lines[place + 2 : place + 4]] == ["ba de li mo"] * 2
    place = lines.index("           2   4.17 %  where the target came before")
    examples = [line.rpartition(":")[2] for line in lines[place + 1 : place + 7 : 3]]
    assert examples == ["5", "6"], "each has its place, source and target"
    assert all(len(line) <= 80 for line in lines)
    again = open_prepared(store.folder)  # the report is one of its own files
    assert again.statistics["train"]["duplicate"] == 2


def test_examples_of_reasons_and_duplicates(tmp_path: Path, make_recipe: Make, corpus: Path) -> None:
    left_out = LeftOut()
    for number in range(1, 6):
        left_out.add("duplicate", f"train.en:{number}", (f"source {number}", f"target {number}"))
    left_out.write(tmp_path, make_recipe().pairs, 10)
    _, reason, *examples = map(str.strip, report_lines(tmp_path))
    assert reason.startswith("5")
    assert examples == [line for n in (1, 2, 3) for line in (f"train.en:{n}", f"source {n}", f"target {n}")]
    write_pairs(corpus, "again", made_up_pairs(200)[:50] + made_up_pairs(10, seed=99))
    found = prepared(make_recipe(train=["train", "again"], filters={"duplicates": "pairs"}), corpus)
    once = len(set(made_up_pairs(200)))
    assert len(found.train) == once + 10
    assert found.train.corpora == [0, once]


def test_a_pair_that_is_too_long_is_the_first_of_its_kind(corpus: Path, make_recipe: Make) -> None:
    """Tokens are counted after all else, with a vocabulary of what is left: both go."""
    write_pairs(corpus, "train", [("ba " * 50, "de li"), ("mo", "de li"), *made_up_pairs(20)])
    recipe = make_recipe(filters={"duplicates": "target"}, max_length=40, subwords={"type": "words"})
    found = prepared(recipe, corpus)
    counts = found.statistics["train"]
    assert counts["too_long"] == 1
    assert counts["duplicate"] == 1 + 20 - len({target for _, target in made_up_pairs(20)})
    assert int(found.train.location(0).rpartition(":")[2]) == 3


def test_filters_make_a_store_anew_and_idle_ones_do_not(corpus: Path, make_recipe: Make) -> None:
    plain = prepared(make_recipe(), corpus)
    assert prepared(make_recipe(filters={}, noise={"typos": 0.5}), corpus).statistics == plain.statistics
    assert len(prepared(make_recipe(filters={"min_words": 2}), corpus).train) < len(plain.train)
    assert len(prepared(make_recipe(), corpus).train) == len(plain.train)
    assert report_lines(Path("store")) == []


def test_pairs_of_other_languages_are_left_out(corpus: Path, make_recipe: Make) -> None:
    pytest.importorskip("py3langid")
    english = "The committee will discuss the new proposal tomorrow."
    german = "Der Ausschuss wird morgen über den Vorschlag reden."
    french = "Le comité discutera demain de la nouvelle proposition."
    write_pairs(corpus, "train", [(english, german), (french, german), (english, english)])
    found = prepared(make_recipe(filters={"language_certainty": 0.5}, subwords={"type": "words"}), corpus)
    assert (len(found.train), found.statistics["train"]["language"]) == (1, 2)
    assert found.train.location(0).endswith(":1")


def test_language_is_refused(corpus: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("py3langid")
    for side in ("en", "de"):
        (corpus / f"train.{side}").rename(corpus / f"train.{side}x")
        (corpus / f"valid.{side}").rename(corpus / f"valid.{side}x")
    recipe = make_recipe(source="enx", target="dex", test=None, filters={"language_certainty": 0.5})
    told = r"language_certainty: py3langid does not know the language 'enx'; it knows .*en"
    with pytest.raises(InputError, match=told):
        prepared(recipe, corpus)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(InputError, match=r"not installed; run pip install py3langid, or remove the key"):
        prepared(recipe, corpus)


def test_nothing_left_is_told(corpus: Path, make_recipe: Make) -> None:
    message = r"no training pair is left of 200: 0 longer .*, 200 with fewer than 90 words"
    with pytest.raises(InputError, match=message):
        prepared(make_recipe(filters={"min_words": 90}, subwords={"type": "words"}), corpus)


def test_a_pair_that_is_left_out_for_another_reason_is_no_first_of_its_duplicates(
    corpus: Path, make_recipe: Make
) -> None:
    first = [("ba de", "li " * 20), ("ba de", "mo nu"), ("ba de", "mo ra"), ("", "mo"), ("", "nu")]
    write_pairs(corpus, "train", [*first, *made_up_pairs(20)])
    filters = {"max_length_ratio": 3.0, "duplicates": "source"}
    store = prepared(make_recipe(filters=filters, empty_lines="skip", subwords={"type": "words"}), corpus)
    lines = [int(store.train.location(index).rpartition(":")[2]) for index in range(len(store.train))]
    assert [line for line in lines if line <= 5] == [2]
    assert store.statistics["train"]["duplicate"] == 1


def test_a_certainty_that_is_just_reached_is_enough(
    corpus: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    certainties = {"ba": 0.75, "de": 0.7}
    classifier = "econmt.data.text.filters.language_classifier"
    monkeypatch.setattr(classifier, lambda languages: lambda text: ("xx", certainties[text]))
    pairs = make_recipe(filters={"language_certainty": 0.75}, subwords={"type": "words"}).pairs
    selection = Selection(pairs, [])
    assert [selection._reason(text, text) for text in certainties] == ["language", None]


@pytest.mark.parametrize(
    ("kind", "what"), [("pairs", "the pair"), ("source", "the source"), ("target", "the target")]
)
def test_a_duplicate_is_called_by_its_kind(make_recipe: Make, kind: str, what: str) -> None:
    data = make_recipe(filters={"duplicates": kind}).data
    assert words_of("duplicate", data) == f"where {what} came before"


def test_repeated_words_are_counted() -> None:
    expected = {
        "a dog runs": 1,
        "the the the dog": 3,
        "no , no , no , no !": 3,
        "a b c d e f g h a b c d e f g h": 2,
        "a b c d e f g h i a b c d e f g h i": 1,
        ". . . . . .": 1,
        "1 000 000 000": 1,
        "我喜欢我喜欢我喜欢猫我喜欢我喜欢我喜欢我喜欢": 4,
        "ab" * 10: 1,
        "ab" * 10 + "a": 10,
        "": 1,
    }
    assert {text: repeats(text) for text in expected} == expected
