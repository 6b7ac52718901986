"""``python -m scripts.bench parallel``: measurements of several processes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from scripts.tests.test_parallel_measure import RECIPE
from tests.unit.cli.conftest import Call


@pytest.mark.parametrize(
    ("option", "value"), [("--processes", "0"), ("--processes", "two"), ("--division", "data,rows")]
)
def test_bad_options_are_refused(bench: Call, option: str, value: str) -> None:
    ended = bench("parallel", "ptb", option, value)
    assert ended.code == 2
    assert f"{option}: invalid" in ended.err
    assert f"'{value}'" in ended.err


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
