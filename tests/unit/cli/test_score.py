"""``econmt score``, and that it agrees with ``econmt translate``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Call

SOURCES = ["a b c", "d", "h g f e d c", "b b", "a h"]


def translated(call: Call, model: Path, *options: object) -> list[dict[str, object]]:
    ended = call(
        "translate", "-m", model, "--output-type", "json", *options, text="".join(s + "\n" for s in SOURCES)
    )
    return [json.loads(line) for line in ended.lines]


def tabbed(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{source}\t{target}\n" for source, target in pairs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", ["word_model", "subword_model"])
@pytest.mark.parametrize("options", [["-b", "5"], ["-b", "1"], ["--max-output-factor", "0.1"], ["--sample"]])
def test_scores_of_tokens_agree_with_the_translator(
    call: Call, request: pytest.FixtureRequest, model: str, options: list[str]
) -> None:
    folder = request.getfixturevalue(model)
    found = translated(call, folder, *options)
    text = tabbed([(s, " ".join(line["tokens"])) for s, line in zip(SOURCES, found, strict=True)])  # type: ignore[arg-type]
    for kind, key in (("logprob", "log_probability"), ("normalized", "score")):
        scores = call("score", "-m", folder, "--target-tokens", "--score-type", kind, text=text).lines
        assert [float(score) for score in scores] == pytest.approx([line[key] for line in found], abs=1e-4)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_16_bits_scores_agree_to_some_hundredths(call: Call, subword_model: Path, precision: str) -> None:
    found = translated(call, subword_model, "--precision", precision)
    text = tabbed([(s, " ".join(line["tokens"])) for s, line in zip(SOURCES, found, strict=True)])  # type: ignore[arg-type]
    scored, exact = (
        [
            float(score)
            for score in call(
                "score", "-m", subword_model, "--target-tokens", "--precision", name, text=text
            ).lines
        ]
        for name in (precision, "float32")
    )
    assert scored != exact
    assert scored == pytest.approx([line["log_probability"] for line in found], abs=0.1)


@pytest.mark.parametrize("model", ["word_model", "subword_model"])
def test_scores_of_text_cut_alike_agree(call: Call, request: pytest.FixtureRequest, model: str) -> None:
    folder = request.getfixturevalue(model)
    found = translated(call, folder)
    text = tabbed([(s, line["translation"]) for s, line in zip(SOURCES, found, strict=True)])  # type: ignore[misc]
    scored = [
        json.loads(line) for line in call("score", "-m", folder, "--score-type", "json", text=text).lines
    ]
    same = [(a, b) for a, b in zip(found, scored, strict=True) if a["tokens"] == b["tokens"]]
    assert same
    for one, other in same:
        assert other["log_probability"] == pytest.approx(one["log_probability"], abs=1e-4)
        assert other["score"] == pytest.approx(one["score"], abs=1e-4)


@pytest.mark.parametrize("mode", ["linear", "log_linear"])
def test_an_ensembles_scores_agree_too(call: Call, word_model: Path, mode: str) -> None:
    ensemble = ("-m", word_model, "--checkpoint", 4, "--checkpoint", 8, "--ensemble-mode", mode)
    found = translated(call, word_model, *ensemble)
    text = tabbed([(s, " ".join(line["tokens"])) for s, line in zip(SOURCES, found, strict=True)])  # type: ignore[arg-type]
    scores = call("score", "-m", word_model, *ensemble, "--target-tokens", text=text).lines
    assert [float(score) for score in scores] == pytest.approx(
        [line["log_probability"] for line in found], abs=1e-4
    )


def test_kinds_of_scores(call: Call, word_model: Path, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("a b c\n\n\n")
    (tmp_path / "t").write_text("C B A\nA\n\n")
    files = ("-s", tmp_path / "s", "-t", tmp_path / "t")
    found = [
        json.loads(line) for line in call("score", "-m", word_model, *files, "--score-type", "json").lines
    ]
    total = found[0]["log_probability"]
    assert found[0]["tokens"] == ["C", "B", "A"]
    assert len(found[0]["token_log_probabilities"]) == 4
    assert sum(found[0]["token_log_probabilities"]) == pytest.approx(total)
    # A blank line has one translation, the empty one.
    assert found[1]["log_probability"] is None
    assert found[2]["log_probability"] == 0.0

    def first(kind: str, *options: object) -> list[float]:
        return [
            float(x) for x in call("score", "-m", word_model, *files, "--score-type", kind, *options).lines
        ]

    assert first("logprob") == pytest.approx([total, -math.inf, 0.0], abs=1e-6)
    assert first("neglogprob") == pytest.approx([-total, math.inf, 0.0], abs=1e-6)
    assert first("normalized")[0] == pytest.approx(total / 4, abs=1e-6)
    penalised = first("normalized", "--length-penalty-alpha", 0.5, "--length-penalty-beta", 3.0)
    assert penalised[0] == pytest.approx(total / ((3 + 4) / 4) ** 0.5, abs=1e-6)
    assert first("perplexity") == pytest.approx([math.exp(-total / 4), math.inf, 1.0], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [
        ([], "a\n", ["standard input:1", "1 tab-separated columns"]),
        ([], "a\tA\nb\tB\tC\n", ["standard input:2", "3 tab-separated columns"]),
        (["--target-tokens"], "a\tA\nb\tA nothing\n", ["standard input:2", "'nothing' is not a token"]),
        (["--target-tokens"], "a\t</s>\n", ["'</s>' is not a token"]),
        (["-s", "x"], "", ["both --source and --target"]),
        (["--total"], "a\tA\n", ["--total is for language models"]),
    ],
)
def test_what_cannot_be_scored_is_one_clear_line(
    call: Call, word_model: Path, arguments: list[str], given: str, words: list[str]
) -> None:
    ended = call("score", "-m", word_model, *arguments, text=given)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert all(word in ended.err for word in words)


def test_a_pair_past_the_longest_is_refused(call: Call, word_model: Path) -> None:
    text = "a b\tB A\na b c\tB A\n"
    assert call("score", "-m", word_model, "--max-input-length", "3", text=text).code == 0
    ended = call("score", "-m", word_model, "--max-input-length", "2", text=text)
    assert ended.code == 2
    assert "standard input:2: 3 tokens on a side, more than a pair of 2 may have" in ended.err
