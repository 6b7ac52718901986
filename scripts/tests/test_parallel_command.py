"""``python -m scripts.bench parallel``: measurements and predictions."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from scripts.bench.parallel_profile import write_profile
from scripts.tests.test_parallel_measure import RECIPE, profile
from tests.unit.cli.conftest import Call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--predict", "--ranks", "1,x"], "--ranks '1,x': give numbers from 1 to 65,536"),
        (["--predict", "--ranks", "0"], "--ranks '0': give numbers"),
        (["--division", "data,rows"], "--division 'data,rows': give some of data, pipeline, both"),
        (["--processes", "two"], "--processes 'two': give numbers"),
    ],
)
def test_bad_options_are_refused_in_a_line(bench: Call, arguments: list[str], words: str) -> None:
    ended = bench("parallel", "ptb", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_a_profile_of_something_else(bench: Call, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(path, profile())
    ended = bench("parallel", "ptb", "--predict", "--profile", path, "--device", "cpu")
    assert ended.code == 2
    assert (
        "p.json: of tiny, 8 rows of 12 on cpu, not ptb, 20 rows of 35 on cpu; give another file" in ended.err
    )


def test_a_profile_is_enough_for_a_prediction(bench: Call, tmp_path: Path) -> None:
    path, file = tmp_path / "p.json", tmp_path / "p.csv"
    write_profile(path, profile(recipe="ptb", batch=20, length=35, hosted=4, alone=10e-3))
    options = ("--device", "cpu", "--batch", "grown", "--ranks", "1,2,1024")
    ended = bench(
        "parallel",
        "ptb",
        "--predict",
        "--profile",
        path,
        *options,
        "--csv",
        file,
    )
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["division"] for row in rows] == ["alone", "2 data", "1024 data"]
    assert float(rows[1]["scaling"]) == pytest.approx(2.0), "links here are free"
    assert 1000 < float(rows[2]["scaling"]) < 1024, "those between hosts are not"


@pytest.mark.thorough
def test_two_processes_are_timed(bench: Call, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    options = (
        "--processes",
        "1,2",
        "--division",
        "data",
        "--length",
        "6",
        "--seconds",
        "0.05",
        "--device",
        "cpu",
    )
    ended = bench("parallel", tmp_path / "tiny.yaml", *options, "--csv", tmp_path / "p.csv")
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    with (tmp_path / "p.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["division"] for row in rows] == ["alone", "2 data"]


@pytest.mark.parametrize(
    ("division", "processes", "lines"),
    [
        (
            "pipeline",
            "1,2",
            [
                "division pipeline of 2 processes is not measured: parallel.pipeline 2: model.encoder and model.decoder "
                "have at most one layer; a pipeline cannot have more stages than layers"
            ],
        ),
        (
            "both",
            "2,4",
            [
                f"division both of {count} processes is not measured: parallel.pipeline 2: model.encoder and "
                "model.decoder have at most one layer; a pipeline cannot have more stages than layers"
                for count in (2, 4)
            ],
        ),
    ],
)
def test_a_division_that_cannot_be_measured_is_refused_with_the_reason(
    bench: Call, division: str, processes: str, lines: list[str]
) -> None:
    ended = bench("parallel", "quickstart", "--processes", processes, "--division", division)
    assert ended.code == 2
    assert ended.err.splitlines() == [f"parallel: {line}" for line in lines]
