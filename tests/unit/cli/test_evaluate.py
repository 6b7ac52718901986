"""``econmt evaluate`` beside sacreBLEU's own command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Call

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
    assert "|tok:char|" in call(*given, "-l", "th").out
    assert "|tok:13a|" in call(*given, "--tokenize", "13a").out


def sacrebleu(*arguments: object) -> str:
    command = [sys.executable, "-m", "sacrebleu", *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_figures_and_signatures_are_sacrebleus(call: Call, files: dict[str, Path]) -> None:
    found = call("evaluate", "-r", files["ref"], "-i", files["base"], "-w", 4)
    expected = sacrebleu(
        files["ref"], "-i", files["base"], "-m", "bleu", "chrf", "ter", "-w", 4, "-f", "text", "-nc"
    )
    assert found.lines == [line.lstrip() for line in expected.splitlines()]
    assert [line.split("|")[0] for line in found.lines] == ["BLEU", "chrF2", "TER"]


def test_standard_input_options_and_several_references(call: Call, files: dict[str, Path]) -> None:
    options = "--metrics bleu,chrf --tokenize none --lowercase"
    text = files["base"].read_text()
    found = call(f"evaluate {options}", "-r", files["ref"], "-r", files["better"], text=text)
    expected = sacrebleu(
        *(files["ref"], files["better"], "-i", files["base"], "-m", "bleu", "chrf", "-w", 2, "-f", "text"),
        *("-tok", "none", "-lc", "--chrf-lowercase", "-nc", "--force"),
    )
    assert found.lines == [line.lstrip() for line in expected.splitlines()]


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
    text = call("evaluate", *arguments).out
    assert text.count("baseline") == 3
    assert text.count("better, significant at 0.05") == 3
    assert "bs:200|seed:12345" in text


def test_the_worse_and_the_equal_are_called_so(call: Call, files: dict[str, Path], tmp_path: Path) -> None:
    same = tmp_path / "same"
    same.write_text(files["better"].read_text())
    systems = ("-i", files["better"], "-i", files["base"], "-i", same)
    text = call("evaluate --samples 100 -r", files["ref"], *systems).out
    assert text.count("worse, significant at 0.05") == 3
    assert text.count("  equal") == 3
