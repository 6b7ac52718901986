from __future__ import annotations

import csv
from pathlib import Path

import pytest

from econmt.bench.parallel_calibration import write_calibration
from tests.unit.bench.test_parallel_measure import RECIPE, calibration
from tests.unit.cli.conftest import Call


def test_the_seeds_hardware_is_predicted(call: Call, tmp_path: Path) -> None:
    file, picture = tmp_path / "p.csv", tmp_path / "p.png"
    ended = call("bench", "parallel", "--simulate", "--csv", file, "--plot", picture)
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    assert "(5.3x published): beyond the aim of 8.0x" in " ".join(ended.out.split())
    assert "fastest for 2 to 4 ranks: pipeline" in ended.out
    assert picture.stat().st_size > 0
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["buckets"] for row in rows} == {"derived", "none"}
    assert {row["ranks"] for row in rows} == {"1", "2", "4"}
    assert all(float(row["tokens/s"]) > 0 for row in rows)


def test_a_recipe_on_other_hardware(call: Call) -> None:
    options = (
        "--simulate",
        "--hardware",
        "h200",
        "--ranks",
        "1,16",
        "--batch",
        "grown",
        "--between",
        "10gbe",
    )
    fast = call("bench", "parallel", "iwslt", *options, "--division", "data")
    assert fast.code == 0, fast.err
    assert max(map(len, fast.lines)) <= 80
    assert "fastest for 16 ranks: data" in fast.out
    sharded = call("bench", "parallel", "iwslt", *options, "--division", "data", "--sharded")
    assert sharded.out != fast.out


def test_a_text_gives_the_lengths(call: Call, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n".join("w " * (number % 30 + 1) for number in range(300)))
    ended = call(
        "bench",
        "parallel",
        "ptb",
        "--simulate",
        "--hardware",
        "h200",
        "--text",
        tmp_path / "text",
        "--ranks",
        "1,2",
    )
    assert ended.code == 0, ended.err
    assert {line.split()[0] for line in ended.lines} >= {"derived", "none"}


SEED = ["--simulate"]
HERE = ["ptb", "--simulate"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a recipe, as iwslt, or --simulate"),
        (["--simulate", "--hardware", "h200"], "give a recipe, as iwslt"),
        ([*SEED, "--ranks", "1,x"], "--ranks '1,x': give numbers from 1 to 65,536"),
        ([*SEED, "--ranks", "0"], "--ranks '0': give numbers"),
        ([*SEED, "--division", "data,rows"], "--division 'data,rows': give some of data, pipeline, both"),
        ([*SEED, "--batch", "halved"], "--batch 'halved': give fixed or grown"),
        ([*SEED, "--within", "string"], "--within 'string': give one of pcie2-x8"),
        ([*SEED, "--length", "7"], "--length is of full rows"),
        ([*SEED, "--processes", "2"], "--processes is for this machine"),
        ([*SEED, "--profile", "p.json"], "--profile is for this machine"),
        ([*HERE, "--hardware", "abacus"], "--hardware 'abacus': give one of here, seed, h200"),
        ([*HERE, "--hardware", "h200", "--text", "missing"], "missing: no such file"),
        ([*HERE, "--hardware", "h200", "--text", "missing", "--length", "7"], "--length is of full rows"),
        ([*HERE, "--within", "hdr"], "--within is measured here"),
        ([*HERE, "--text", "missing"], "--text is for published hardware"),
        ([*HERE, "--profile", "missing/p.json"], "missing: no such folder"),
        (["ptb", "--processes", "two"], "--processes 'two': give numbers"),
        (["ptb", "--ranks", "2"], "--ranks is for --simulate"),
        (["ptb", "--micro-batches"], "--micro-batches is for --simulate"),
        (["ptb", "--sharded"], "--sharded is for --simulate"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(call: Call, arguments: list[str], words: str) -> None:
    ended = call("bench", "parallel", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_a_profile_of_something_else(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_calibration(path, calibration())
    ended = call("bench", "parallel", *HERE, "--profile", path, "--device", "cpu")
    assert ended.code == 2
    assert (
        "p.json: of tiny, 8 rows of 12 on cpu, not ptb, 20 rows of 35 on cpu; give another file" in ended.err
    )


def test_a_profile_is_enough_for_a_prediction(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_calibration(path, calibration(recipe="ptb", batch=20, length=35))
    options = ("--device", "cpu", "--ranks", "1,2,4", "--plot", tmp_path / "p.png")
    ended = call("bench", "parallel", *HERE, "--profile", path, *options)
    assert ended.code == 0, ended.err
    assert "fastest for 2 to 4 ranks: data" in ended.out
    assert max(map(len, ended.lines)) <= 80
    assert (tmp_path / "p.png").stat().st_size > 0


@pytest.mark.slow
def test_two_processes_are_timed(call: Call, tmp_path: Path) -> None:
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
    ended = call("bench", "parallel", tmp_path / "tiny.yaml", *options, "--csv", tmp_path / "p.csv")
    assert ended.code == 0, ended.err
    assert "over one: 2 processes" in ended.out
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
                "have at most one layer; a pipeline has at most as many stages as layers"
            ],
        ),
        (
            "both",
            "2,4",
            [
                f"division both of {count} processes is not measured: parallel.pipeline 2: model.encoder and "
                "model.decoder have at most one layer; a pipeline has at most as many stages as layers"
                for count in (2, 4)
            ],
        ),
    ],
)
def test_a_division_that_cannot_be_measured_is_refused_with_the_reason(
    call: Call, division: str, processes: str, lines: list[str]
) -> None:
    ended = call("bench", "parallel", "quickstart", "--processes", processes, "--division", division)
    assert ended.code == 2
    assert ended.err.splitlines() == [f"econmt: error: {line}" for line in lines]
