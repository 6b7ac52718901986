"""``econmt score``, ``evaluate`` and ``rerank``: beside ``econmt translate`` and sacreBLEU's own command."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from econmt.cli.evaluate import _comparison_text
from econmt.evaluation.metrics import Comparison, Significance
from econmt.evaluation.reranking import read_candidate
from tests.conftest import run_python
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused


@pytest.fixture(autouse=True)
def _two_pairs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt.cli.score.CHUNK_SIZE", 2)


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
        ("", "a\tA\nb\tB\nb\tB\tC\n", "standard input:3", "2 tabs; expected one"),
        ("--target-tokens", "a\tA\nb\tA\nb\tA nothing\n", "standard input:3", "'nothing' is not a token"),
        ("--target-tokens", "a\t</s>\n", "'</s>' is not a token"),
    ):
        refused(call(f"score {options} -m", word_model, text=given), *words)


def test_a_pair_past_the_longest_is_refused(call: Call, word_model: Path) -> None:
    text = "a b\tB A\na b c\tB A\n"
    assert call("score", "-m", word_model, "--max-input-length", "3", text=text).code == 0
    ended = call("score --max-input-length 2 -m", word_model, text=text)
    refused(ended, "standard input:2: 3 tokens on a side, more than a pair of 2 may have")


TEXT = "a b c\nd\n\nh g f e d\n"


@pytest.fixture
def lists(call: Call, word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lists of a text, of which two are scored at a time."""
    monkeypatch.setattr("econmt.cli.rerank.LISTS_AT_ONCE", 2)
    found = call("translate --nbest-size 3 --beam-size 3 --chunk-size 3 -m", word_model, text=TEXT)
    path = tmp_path / "lists"
    path.write_text(found.out)
    (tmp_path / "source").write_text(TEXT)
    return path


def test_a_reference_finds_the_nearest(
    call: Call, lists: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [read_candidate(line, "x") for line in lists.read_text().splitlines()]
    wanted = [[row.text for row in rows if row.number == number][-1] for number in range(4)]
    reference = tmp_path / "reference.trg"
    reference.write_text("".join(text + "\n" for text in wanted))
    found = call("rerank", "-i", lists, "-r", reference, "--metric", "chrf")
    assert (found.code, found.lines) == (0, wanted)
    monkeypatch.setattr("econmt.evaluation.metrics._is_installed", lambda _: False)
    packed = tmp_path / "reference.ko.gz"
    packed.write_bytes(gzip.compress(reference.read_bytes()))
    whole = call("rerank --metric bleu --nbest -r", packed, text=lists.read_text())
    assert "pip install 'sacrebleu[ko]'" in whole.err
    assert sorted(read_candidate(line, "x").text for line in whole.lines) == sorted(row.text for row in rows)


def test_models_order_as_score_says(call: Call, lists: Path, word_model: Path, tmp_path: Path) -> None:
    options = ("rerank", "-i", lists, "-s", tmp_path / "source", "--nbest")
    plain = call(*options, "-m", word_model, "--weight", 0).lines
    assert plain == lists.read_text().splitlines()
    both = (*options, "--reverse-weight", 0, "--reverse-model", word_model, "-m", word_model, "--weight", 2)
    rows = [read_candidate(line, "x") for line in call(*both).succeeded().lines]
    before = {(row.number, row.text): row.score for row in (read_candidate(line, "x") for line in plain)}
    sources = TEXT.split("\n")
    for row in rows:
        if sources[row.number]:
            pair = f"{sources[row.number]}\t{row.text}\n"
            scored = call("score --score-type normalized --length-penalty-alpha 1 -m", word_model, text=pair)
            expected = before[row.number, row.text] + 2 * float(scored.lines[0])
            assert row.score == pytest.approx(expected, abs=1e-4)


def test_sentences_of_a_line_are_translated_apart_or_told_of(call: Call, word_model: Path) -> None:
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
    later = call("translate", "-m", word_model, "--chunk-size", 1, text="d\n\na b! C\n")
    assert "standard input:3: 1 line has several sentences" in later.err


REFERENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "Two young, White males are outside near many bushes.",
    "Several men in hard hats are operating a giant pulley system.",
    "A little girl climbing into a wooden playhouse.",
    "",
]
BASELINE = [
    "The quick brown fox jumped over a lazy dog.  ",
    "A man in a shirt is standing on a ladder and cleans a window.",
    "Two young white men are outside near bushes.",
    "Men in hats operate a giant system of pulleys.",
    "A girl climbs into a playhouse made of wood .",
    "",
]
BETTER = [*REFERENCES[:4], BASELINE[4], ""]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {}
    for name, lines in (("ref", REFERENCES), ("base", BASELINE), ("better", BETTER)):
        paths[name] = tmp_path / name
        # Enough lines for resampling to mean something.
        paths[name].write_text("".join(line + "\n" for line in lines * 10))
    return paths


def test_the_language_chooses_the_tokenizer(call: Call, tmp_path: Path) -> None:
    (tmp_path / "test.zh").write_text("一只狗在草地上跑。\n", encoding="utf-8")
    (tmp_path / "out").write_text("一只狗在草地跑。\n", encoding="utf-8")
    given = ("evaluate", "-r", tmp_path / "test.zh", "-i", tmp_path / "out", "--metrics", "bleu")
    assert "|tok:zh|" in call(*given).out
    (tmp_path / "test.zh.gz").write_bytes(gzip.compress((tmp_path / "test.zh").read_bytes()))
    packed = call("evaluate", "-r", tmp_path / "test.zh.gz", "-i", tmp_path / "out", "--metrics", "bleu")
    assert packed.out == call(*given).out
    assert "|tok:char|" in call(*given, "-l", "th").out
    assert "|tok:13a|" in call(*given, "--tokenize", "13a").out


def sacrebleu(*arguments: object) -> str:
    return run_python("-m", "sacrebleu", *map(str, arguments)).stdout


def test_figures_and_signatures_are_sacrebleus(call: Call, files: dict[str, Path]) -> None:
    found = call("evaluate", "-r", files["ref"], "-i", files["base"], "-w", 4)
    expected = sacrebleu(
        files["ref"], "-i", files["base"], "-m", "bleu", "chrf", "ter", "-w", 4, "-f", "text", "-nc"
    )
    assert found.lines == [line.lstrip() for line in expected.splitlines()]
    assert [line.split("|")[0] for line in found.lines] == ["BLEU", "chrF2", "TER"]


def test_standard_input_options_and_several_references_are_taken(call: Call, files: dict[str, Path]) -> None:
    options = "--metrics chrf,bleu --tokenize none --lowercase"
    text = files["base"].read_text()
    found = call(f"evaluate {options}", "-r", files["ref"], "-r", files["better"], text=text)
    expected = sacrebleu(
        *(files["ref"], files["better"], "-i", files["base"], "-m", "bleu", "chrf", "-w", 2, "-f", "text"),
        *("-tok", "none", "-lc", "--chrf-lowercase", "-nc", "--force"),
    )
    assert found.lines[::-1] == [line.lstrip() for line in expected.splitlines()]


def test_json_is_not_rounded(call: Call, files: dict[str, Path]) -> None:
    (found,) = json.loads(
        call("evaluate", "-r", files["ref"], "-i", files["base"], "--metrics", "bleu", "--json").out
    )
    (expected,) = [json.loads(sacrebleu(files["ref"], "-i", files["base"], "-w", 10, "-nc"))]
    assert found["name"] == "BLEU"
    assert found["value"] == pytest.approx(expected["score"], abs=1e-10)
    assert found["signature"] == expected["signature"]


def test_two_systems_are_compared_as_sacrebleu_compares_them(call: Call, files: dict[str, Path]) -> None:
    arguments = ("-r", files["ref"], "-i", files["base"], "-i", files["better"], "--samples", 200)
    tables = json.loads(call("evaluate", *arguments, "--json").out)
    assert [table["name"] for table in tables] == ["BLEU", "chrF2", "TER"]
    # sacreBLEU's own command cannot print the others in JSON beside NumPy 2.
    expected = sacrebleu(
        *(files["ref"], "-i", files["base"], files["better"], "-m", "bleu", "-w", 4),
        *("--paired-bs", "--paired-bs-n", 200, "-f", "json", "-nc"),
    )
    theirs = json.loads(expected)
    for system, other in zip(tables[0]["systems"], theirs, strict=True):
        for name, their in (("value", "score"), ("mean", "mean"), ("interval", "ci"), ("p_value", "p_value")):
            if system[name] is not None:
                assert system[name] == pytest.approx(other["BLEU"][their], abs=1e-4), name
    for table in tables:
        assert table["systems"][1]["better"] is True
        assert table["systems"][1]["p_value"] < 0.05
        assert "bs:200|seed:12345" in table["signature"]


def test_what_is_significant_is_marked() -> None:
    rows = [("a", 30.0, 30.12, 1.25, None, None), ("bc", 31.0, 31.1, 1.0, 0.0499, True)]
    rows += [("d", 29.0, 29.0, 1.0, 0.05, False), ("e", 30.0, 30.0, 1.0, 1.0, None)]
    table = Significance("BLEU", "nrefs:1", [Comparison(*row) for row in rows])
    assert _comparison_text([table], 1).splitlines() == [
        "BLEU|nrefs:1",
        "  a   30.0  (30.1 +- 1.2)  baseline",
        "  bc  31.0  (31.1 +- 1.0)  p = 0.0499  better, significant at 0.05",
        "  d   29.0  (29.0 +- 1.0)  p = 0.0500  worse",
        "  e   30.0  (30.0 +- 1.0)  p = 1.0000  equal",
    ]
