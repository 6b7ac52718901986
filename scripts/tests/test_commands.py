"""``python -m scripts.bench``: the project's own benchmarks, at tiny sizes."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import language_model
from scripts.bench.__main__ import COMMANDS, scripts
from tests.conftest import econmt_environment
from tests.unit.cli.conftest import Call


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_gives_examples(name: str, bench: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = bench(name, "--help")
    assert ended.code == 0
    assert f"python -m scripts.bench {name}" in ended.out
    assert max(map(len, ended.lines)) <= 80


OPTIONAL = "triton matplotlib sacremoses ctranslate2 liger_kernel cut_cross_entropy accelerated_scan uvicorn starlette"
ALL_HELP = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({OPTIONAL.split()!r}))  # as if they were not installed
from scripts.bench.__main__ import scripts
for name in scripts():
    sys.argv = [name, "--help"]
    print(f"## {{name}}", flush=True)
    try:
        runpy.run_module(f"scripts.bench.{{name.replace('-', '_')}}", run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
"""


@pytest.mark.slow
def test_every_script_has_a_help_text_without_a_gpu_and_optional_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_HELP],
        env=econmt_environment() | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = dict(part.split("\n", 1) for part in done.stdout.split("## ")[1:])
    assert said.keys() == scripts().keys()
    for name, text in said.items():
        assert f"python -m scripts.bench {name} " in text.replace("\n", " \n"), name


@pytest.mark.parametrize(("name", "line"), scripts().items())
def test_every_script_is_listed_with_a_whole_sentence(name: str, line: str) -> None:
    assert re.fullmatch(r"(Times|Measures|Writes|Compares) .*\.", line)
    assert len(line) <= 57


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lstm", "--compile-loop"), "--compile-loop is for --ablation"),
        (("lstm", "--ablation", "--limit", "5"), "--limit is for batches up to the peak"),
        (("lstm", "--device", "cpu", "--graphs-only"), "--graphs-only is for a GPU"),
    ],
)
def test_an_option_that_would_change_nothing(words: tuple[str, ...], message: str, bench: Call) -> None:
    ended = bench(*words)
    assert ended.code == 2
    assert message in ended.err


def test_scan(bench: Call, tmp_path: Path) -> None:
    file, picture = tmp_path / "scan.csv", tmp_path / "scan.png"
    options = ("--seconds", "0.01", "--threads", "1", "--csv", file, "--plot", picture)
    ended = bench("scan", "--shape", "2x20x3", "--shape", "1x1x1", "--dtype", "bfloat16", *options)
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    assert "share of" in ended.out
    found = {(row["batch"], row["steps"], row["pass"], row["implementation"]) for row in rows_of(file)}
    assert {("2", "20", "backward", "chunk, carries"), ("1", "1", "forward", "reference")} <= found
    assert picture.stat().st_size > 0


@pytest.mark.parametrize("shape", ["2x3", "2x3xa", "0x3x4", "1x16777217x1", "1x2x3x4"])
def test_scan_of_no_shape(shape: str, bench: Call) -> None:
    ended = bench("scan", "--shape", shape)
    assert ended.code == 2
    assert f"--shape '{shape}'" in ended.err


def test_memory_task(bench: Call, tmp_path: Path) -> None:
    file, picture = tmp_path / "memory.csv", tmp_path / "memory.png"
    small = ("--hidden", "4", "--symbols", "2", "--updates", "20", "--threads", "1")
    ended = bench("memory-task", "--steps", "4..8", *small, "--csv", file, "--plot", picture)
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    rows = rows_of(file)
    assert [(row["steps"], row["cell"]) for row in rows] == [
        (steps, cell) for steps in ("4", "8") for cell in ("lstm", "gilr", "gilr_lstm", "sru", "qrnn")
    ]
    assert all((row["speed-up"] != "") == (row["cell"] != "lstm") for row in rows)
    assert picture.stat().st_size > 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("--cell", "lstm,made-up"), ("--steps", "9..3"), ("--steps", "a"), ("--steps", "99999999")],
)
def test_memory_task_of_no_such_thing(option: str, value: str, bench: Call) -> None:
    ended = bench("memory-task", option, value)
    assert ended.code == 2
    assert f"{option} '" in ended.err


def test_bench_language_model(bench: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(language_model, "has_compiler", lambda: False)
    file, picture = tmp_path / "lm.csv", tmp_path / "lm.png"
    sizes = ("--hidden", "8", "--batch", "2", "--vocabulary", "30")
    options = (*sizes, "--seconds", "0.05", "--csv", file, "--plot", picture)
    measured = bench("language-model", *options)
    assert measured.code == 0, measured.err
    assert max(map(len, measured.lines)) <= 80
    for name in (language_model.DEFAULT, language_model.BY_TORCH, "econmt recompute", language_model.AUTO):
        assert name in measured.out
    assert "auto picks lstm" in measured.out
    count = len(file.read_text().splitlines())
    assert picture.stat().st_size > 0
    assert bench("language-model", *options).code == 0
    assert len(file.read_text().splitlines()) == count  # what is there is not measured again
