"""Metrics as the trainer uses them: the same figure as sacreBLEU by hand on the files."""

from __future__ import annotations

import pytest
import sacrebleu

from econmt.config.recipe import load_recipe
from econmt.errors import EconmtError
from econmt.evaluation import metrics
from econmt.evaluation.metrics import (
    bleu,
    corpus_score,
    make_metric,
    paired_bootstrap,
    recipe_tokenizer,
    tokenizer_of,
)

HYPOTHESES = [
    "Ein Hund rennt über die Wiese.  ",
    "Zwei Männer sitzen auf einer Bank",
    "",
    "Das ist ein Test.",
]
REFERENCES = ["Ein Hund läuft über die Wiese.", "Zwei Männer sitzen auf der Bank. ", "", "Dies ist ein Test."]


def test_bleu_is_that_of_the_stripped_lines() -> None:
    found = bleu(HYPOTHESES, REFERENCES)
    theirs = sacrebleu.BLEU()
    ours, other = ([line.rstrip() for line in lines] for lines in (HYPOTHESES, REFERENCES))
    expected = theirs.corpus_score(ours, [other])
    assert found.value == expected.score
    assert found.value == pytest.approx(49.0, abs=10)
    assert found.signature == str(theirs.get_signature())
    assert found.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert found.text == expected.format(2, signature=found.signature)
    assert found.name == "BLEU"


def test_counts_must_agree() -> None:
    with pytest.raises(ValueError, match="3 hypotheses and 4 references"):
        bleu(HYPOTHESES[:3], REFERENCES)
    with pytest.raises(ValueError, match="0 hypotheses"):
        bleu([], [])


@pytest.mark.parametrize(
    ("language", "name"),
    [
        *(("de", "13a"), ("vi", "13a"), ("trg", "13a"), ("txt", "13a")),
        *(
            ("zh", "zh"),
            ("zh_CN", "zh"),
            ("tok.zh", "zh"),
            ("cmn-Hant", "zh"),
            ("TOK.ZH", "zh"),
            ("th", "char"),
            ("khm", "char"),
        ),
    ],
)
def test_a_target_language_chooses_the_tokenizer(language: str, name: str) -> None:
    assert tokenizer_of(language) == (name, "")


@pytest.mark.parametrize(("language", "name"), [("ja", "ja-mecab"), ("ko", "ko-mecab")])
def test_without_mecab_characters_count(monkeypatch: pytest.MonkeyPatch, language: str, name: str) -> None:
    monkeypatch.setattr(metrics, "_is_installed", lambda _: True)
    assert tokenizer_of(language) == (name, "")
    monkeypatch.setattr(metrics, "_is_installed", lambda _: False)
    found = tokenizer_of(language)
    assert found.name == "char"
    assert f"pip install 'sacrebleu[{language}]'" in found.note


def test_a_run_keeps_its_tokenizer_and_the_recipe_may_name_it() -> None:
    auto = load_recipe("quickstart", ["data.target=zh"])
    assert recipe_tokenizer(auto).name == "zh"
    assert recipe_tokenizer(auto, "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp").name == "13a"
    named = load_recipe("quickstart", ["data.target=zh", "training.bleu_tokenizer=char"])
    assert recipe_tokenizer(named, "nrefs:1|tok:13a|smooth:exp").name == "char"


def test_a_tokenizer_that_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        TOKENIZERS = ("ja-mecab",)

        def __init__(self, **_: object) -> None:
            raise RuntimeError

    monkeypatch.setattr(metrics, "BLEU", Missing)
    told = r"tokenizer 'ja-mecab': not installed; pip install 'sacrebleu\[ja\]'"
    with pytest.raises(EconmtError, match=told):
        make_metric("bleu", [["a"]], tokenize="ja-mecab")


def test_scores_keep_no_lines() -> None:
    """sacreBLEU's tokenizers remember the lines of every metric that there has been."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp

    score = bleu(["a b c d e"] * 2, ["a b c d f"] * 2)
    assert bleu(["a b c d e"] * 2, ["a b c d f"] * 2) == score
    assert [kind.__call__.cache_info().currsize for kind in (Tokenizer13a, TokenizerRegexp)] == [0, 0]


def test_a_system_is_better_in_the_direction_of_the_metric() -> None:
    """An equal one is neither better nor worse; TER falls."""
    lines = [f"the {word} dog runs home now" for word in ("red", "old", "big", "shy")]
    half = [*lines[:2], "a", "b"]
    systems = {"first": half, "same": half, "best": lines, "worst": ["x"] * 4}
    found = paired_bootstrap(systems, {name: make_metric(name, [lines]) for name in ("ter", "bleu")}, 20)
    assert [each.name for each in found] == ["TER", "BLEU"]
    for significance in found:
        assert [each.better for each in significance.systems] == [None, None, True, False]
        assert significance.systems[0].p_value is None
        assert significance.systems[1].p_value is not None


def test_case_is_ignored_where_asked_for() -> None:
    score = {
        (name, lowercase): corpus_score(
            make_metric(name, [["Ein Hund läuft sehr weit"]], lowercase=lowercase),
            ["ein hund läuft sehr weit"],
        ).value
        for name in ("bleu", "chrf")
        for lowercase in (False, True)
    }
    assert score["chrf", True] == pytest.approx(100.0)
    assert score["chrf", False] < 90.0
    assert score["bleu", False] < score["bleu", True]
