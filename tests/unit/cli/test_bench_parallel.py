from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Call


def test_the_seeds_hardware_is_predicted(call: Call, tmp_path: Path) -> None:
    file, picture = tmp_path / "p.csv", tmp_path / "p.png"
    ended = call("bench", "parallel", "--csv", file, "--plot", picture)
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    assert "(5.3x published): reaches the 5.3x" in " ".join(ended.out.split())
    assert "fastest for 2 to 4 ranks: pipeline" in ended.out
    assert picture.stat().st_size > 0
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["buckets"] for row in rows} == {"derived", "none"}
    assert {row["ranks"] for row in rows} == {"1", "2", "4"}
    assert all(float(row["tokens/s"]) > 0 for row in rows)


def test_a_recipe_on_other_hardware(call: Call) -> None:
    options = ("--hardware", "h200", "--ranks", "1,16", "--batch", "grown", "--between", "10gbe")
    fast = call("bench", "parallel", "iwslt", *options, "--division", "data")
    assert fast.code == 0, fast.err
    assert max(map(len, fast.lines)) <= 80
    assert "fastest for 16 ranks: data" in fast.out
    sharded = call("bench", "parallel", "iwslt", *options, "--division", "data", "--sharded")
    assert sharded.out != fast.out


def test_a_text_gives_the_lengths(call: Call, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n".join("w " * (number % 30 + 1) for number in range(300)))
    ended = call("bench", "parallel", "ptb", "--text", tmp_path / "text", "--ranks", "1,2")
    assert ended.code == 0, ended.err
    assert {line.split()[0] for line in ended.lines} >= {"derived", "none"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1,x"], "--ranks '1,x': give numbers from 1 to 65,536"),
        (["--ranks", "0"], "--ranks '0': give numbers"),
        (["--division", "data,rows"], "--division 'data,rows': give some of data, pipeline, both"),
        (["--batch", "halved"], "--batch 'halved': give fixed or grown"),
        (["--hardware", "abacus"], "--hardware 'abacus': give one of seed, h200"),
        (["--hardware", "h200"], "--hardware h200: give a recipe"),
        (["--within", "string"], "--within 'string': give one of pcie2-x8"),
        (["--length", "7"], "--length is for a recipe"),
        (["ptb", "--text", "missing"], "missing: no such file"),
        (["ptb", "--text", "missing", "--length", "7"], "--length is of full rows"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(call: Call, arguments: list[str], words: str) -> None:
    ended = call("bench", "parallel", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1
