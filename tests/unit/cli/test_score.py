"""``econmt score``, and that it agrees with ``econmt translate``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused

SOURCES = ["a b c", "d", "h g f e d c", "b b", "a h"]


def translated(call: Call, model: Path, *options: object) -> list[dict[str, Any]]:
    text = "".join(source + "\n" for source in SOURCES)
    return [
        json.loads(line) for line in call("translate --output-type json -m", model, *options, text=text).lines
    ]


def tokens_of(found: list[dict[str, Any]]) -> str:
    """The sources with the tokens of their translations, as a table."""
    return "".join(f"{s}\t{' '.join(line['tokens'])}\n" for s, line in zip(SOURCES, found, strict=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", ["word_model", "subword_model"])
@pytest.mark.parametrize("options", [["-b", "5"], ["-b", "1"], ["--max-output-factor", "0.1"], ["--sample"]])
def test_scores_of_tokens_agree_with_the_translator(
    call: Call, request: pytest.FixtureRequest, model: str, options: list[str]
) -> None:
    folder = request.getfixturevalue(model)
    found = translated(call, folder, *options)
    text = tokens_of(found)
    for kind, key in (("logprob", "log_probability"), ("normalized", "score")):
        scores = call("score", "-m", folder, "--target-tokens", "--score-type", kind, text=text).lines
        assert [float(score) for score in scores] == pytest.approx([line[key] for line in found], abs=1e-4)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_16_bits_scores_agree_to_some_hundredths(call: Call, subword_model: Path, precision: str) -> None:
    found = translated(call, subword_model, "--precision", precision)
    text = tokens_of(found)
    scored, exact = (
        [*map(float, call(f"score --target-tokens --precision {name} -m", subword_model, text=text).lines)]
        for name in (precision, "float32")
    )
    assert scored != exact
    assert scored == pytest.approx([line["log_probability"] for line in found], abs=0.1)


@pytest.mark.parametrize("model", ["word_model", "subword_model"])
def test_scores_of_text_cut_alike_agree(call: Call, request: pytest.FixtureRequest, model: str) -> None:
    folder = request.getfixturevalue(model)
    found = translated(call, folder)
    text = "".join(f"{s}\t{line['translation']}\n" for s, line in zip(SOURCES, found, strict=True))
    scored = map(json.loads, call("score --score-type json -m", folder, text=text).lines)
    same = [(a, b) for a, b in zip(found, scored, strict=True) if a["tokens"] == b["tokens"]]
    assert same
    for one, other in same:
        assert other["log_probability"] == pytest.approx(one["log_probability"], abs=1e-4)
        assert other["score"] == pytest.approx(one["score"], abs=1e-4)


@pytest.mark.parametrize("mode", ["linear", "log_linear"])
def test_an_ensembles_scores_agree_too(call: Call, word_model: Path, mode: str) -> None:
    ensemble = ("-m", word_model, "--checkpoint", 4, "--checkpoint", 8, "--ensemble-mode", mode)
    found = translated(call, word_model, *ensemble)
    text = tokens_of(found)
    scores = call("score", "-m", word_model, *ensemble, "--target-tokens", text=text).lines
    assert [float(score) for score in scores] == pytest.approx(
        [line["log_probability"] for line in found], abs=1e-4
    )


def test_kinds_of_scores(call: Call, word_model: Path, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a b c\n\n\n")
    (tmp_path / "t").write_text("C B A\nA\n\n")
    files = ("-s", tmp_path / "s", "-t", tmp_path / "t")
    found = [*map(json.loads, call("score --score-type json -m", word_model, *files).lines)]
    total = found[0]["log_probability"]
    assert found[0]["tokens"] == ["C", "B", "A"]
    assert len(found[0]["token_log_probabilities"]) == 4
    assert sum(found[0]["token_log_probabilities"]) == pytest.approx(total)
    # A blank line has one translation, the empty one.
    assert found[1]["log_probability"] is None
    assert found[2]["log_probability"] == 0.0

    def first(kind: str, *options: object) -> list[float]:
        return [*map(float, call(f"score --score-type {kind} -m", word_model, *files, *options).lines)]

    assert first("logprob") == pytest.approx([total, -math.inf, 0.0], abs=1e-6)
    assert first("neglogprob") == pytest.approx([-total, math.inf, 0.0], abs=1e-6)
    assert first("normalized")[0] == pytest.approx(total / 4, abs=1e-6)
    penalised = first("normalized", "--length-penalty-alpha", 0.5, "--length-penalty-beta", 3.0)
    assert penalised[0] == pytest.approx(total / ((3 + 4) / 4) ** 0.5, abs=1e-6)
    assert first("perplexity") == pytest.approx([math.exp(-total / 4), math.inf, 1.0], rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 1000])
def test_what_cannot_be_scored_is_one_clear_line(
    call: Call, word_model: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("econmt.cli.score.CHUNK_SIZE", chunk)
    for options, given, *words in (
        ("", "a\tA\nb\tB\tC\n", "standard input:2", "3 tab-separated columns"),
        ("--target-tokens", "a\tA\nb\tA nothing\n", "standard input:2", "'nothing' is not a token"),
        ("--target-tokens", "a\t</s>\n", "'</s>' is not a token"),
    ):
        refused(call(f"score {options} -m", word_model, text=given), *words)


def test_a_pair_past_the_longest_is_refused(call: Call, word_model: Path) -> None:
    text = "a b\tB A\na b c\tB A\n"
    assert call("score", "-m", word_model, "--max-input-length", "3", text=text).code == 0
    ended = call("score --max-input-length 2 -m", word_model, text=text)
    refused(ended, "standard input:2: 3 tokens on a side, more than a pair of 2 may have")
