"""``econmt rerank``, markup and paragraphs through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from econmt.evaluation.reranking import read_candidate
from tests.unit.cli.conftest import Call

TEXT = "a b c\nd\n\nh g f e d\n"


@pytest.fixture
def lists(call: Call, word_model: Path, tmp_path: Path) -> Path:
    found = call("translate", "-m", word_model, "--nbest-size", 3, "--beam-size", 3, text=TEXT)
    path = tmp_path / "lists"
    path.write_text(found.out)
    (tmp_path / "source").write_text(TEXT)
    return path


def test_a_reference_finds_the_nearest(call: Call, lists: Path, tmp_path: Path) -> None:
    rows = [read_candidate(line, "x") for line in lists.read_text().splitlines()]
    wanted = [[row.text for row in rows if row.number == number][-1] for number in range(4)]
    reference = tmp_path / "reference.trg"
    reference.write_text("".join(text + "\n" for text in wanted))
    found = call("rerank", "-i", lists, "-r", reference, "--metric", "chrf")
    assert (found.code, found.lines) == (0, wanted)
    whole = call("rerank", "-r", reference, "--nbest", text=lists.read_text())
    assert sorted(read_candidate(line, "x").text for line in whole.lines) == sorted(row.text for row in rows)


def test_models_order_as_score_says(call: Call, lists: Path, word_model: Path, tmp_path: Path) -> None:
    options = ("rerank", "-i", lists, "-s", tmp_path / "source", "--nbest")
    plain = call(*options, "-m", word_model, "--weight", 0).lines
    assert plain == lists.read_text().splitlines()
    rows = [read_candidate(line, "x") for line in call(*options, "-m", word_model, "--weight", 2).lines]
    before = {(row.number, row.text): row.score for row in (read_candidate(line, "x") for line in plain)}
    sources = TEXT.split("\n")
    for row in rows:
        if sources[row.number]:
            pair = f"{sources[row.number]}\t{row.text}\n"
            scored = call("score --score-type normalized --length-penalty-alpha 1 -m", word_model, text=pair)
            expected = before[row.number, row.text] + 2 * float(scored.lines[0])
            assert row.score == pytest.approx(expected, abs=1e-4)


def test_markup_comes_back(call: Call, word_model: Path) -> None:
    found = call("translate", "-m", word_model, "--markup", text="<b>a b</b> c\n<p></p>\n").lines
    (plain,) = call("translate", "-m", word_model, text="a b c\n").lines
    assert found[0].replace("<b>", "").replace("</b>", "").split() == plain.split()
    assert found[0].index("<b>") < found[0].index("</b>")
    assert found[1] == "<p></p>"


def test_paragraphs(call: Call, word_model: Path) -> None:
    text = "a b! C\n\nd\ne f! G? H\n"
    found = call("translate", "-m", word_model, "--split-sentences", "--chunk-size", 2, text=text)
    alone = call("translate", "-m", word_model, text="a b!\nC\nd\ne f!\nG?\nH\n").lines
    assert found.lines == [" ".join(alone[:2]), "", alone[2], " ".join(alone[3:])]
    assert "several sentences" not in found.err
    numbers = call("translate", "-m", word_model, "--split-sentences", text="3! 4.\t5\na https://x.org/a b\n")
    assert numbers.lines[0] == "3! 4.\t5"
    assert numbers.lines[1].count("https://x.org/a") == 1
    assert "several sentences" not in call("translate", "-m", word_model, text="3! 4. 5\n").err
    whole = call("translate", "-m", word_model, "--chunk-size", 2, text=text)
    assert whole.err.count("warning") == 1
    assert "standard input:1: 2 lines have several sentences, this one first" in whole.err


def test_a_recipe_says_which_repetitions_are_blocked(call: Call, word_model: Path, copy: Path) -> None:
    text = (copy / "recipe.yaml").read_text()
    assert "block_ngram_repeat: 0" in text
    (copy / "recipe.yaml").write_text(text.replace("block_ngram_repeat: 0", "block_ngram_repeat: 1"))
    blocked = call("translate -m", copy, text=TEXT).lines
    assert blocked == call("translate --block-ngram-repeat 1 -m", word_model, text=TEXT).lines
    free = call("translate --block-ngram-repeat 0 -m", copy, text=TEXT).lines
    assert free == call("translate -m", word_model, text=TEXT).lines
    assert all(len(set(line.split())) == len(line.split()) for line in blocked)
