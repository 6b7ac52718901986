"""``python -m scripts.bench choices`` measures the choice again, and tells a loss from noise."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from econmt.errors import InputError
from scripts.bench import choices
from scripts.bench.choices import GridEntry
from tests.unit.bench.clock import Clock, made_up_times
from tests.unit.cli.conftest import Call

CPU = torch.device("cpu")
clock = pytest.fixture(made_up_times)


@pytest.mark.parametrize("op", ["lstm", "linear", "attentional_lstm", "linear_cross_entropy"])
def test_the_grid_measures_the_choice_again(clock: Clock, op: str) -> None:
    entry = GridEntry(op, 2, 3, 8, "float32")
    first, other = {
        "linear": ("reference/row", "reference/column"),
        "linear_cross_entropy": ("recompute", "reference"),
        "lstm": ("reference", "recompute/gates"),
        "attentional_lstm": ("recompute/gates", "reference"),
    }[op]
    clock.rounds = [{first: 1.0, other: 0.5}, {first: 1.0, other: 1.25}]
    clock.samples = {first: (1.0, 2.0, 1.0, 1.0, 1.0), other: (1.25, 2.5, 1.25, 1.2, 1.5)}
    (row,) = choices.regrets([entry], CPU, 1.0)
    assert {name: row[name] for name in GridEntry._fields} == entry._asdict()
    assert (row["choice"], row["rule"], row["best"]) == (other, first, first)
    assert row["regret"] == pytest.approx(0.25)
    assert row["regret of the rule"] == 0.0
    assert row["milliseconds"] == 1250.0
    # The candidates took turns once more; where one of five turns went the other way it may be noise.
    clock.rounds = [{first: 1.0, other: 0.5}, {first: 1.0, other: 1.25}]
    clock.samples[other] = (1.25, 2.5, 1.25, 0.9, 1.5)
    (row,) = choices.regrets([entry], CPU, 1.0)
    assert (row["regret"], row["turns"]) == (0.0, 5)
    assert row["regret with noise"] == pytest.approx(0.25)


def test_parts_share_the_grid_as_published() -> None:
    grid = choices.grid()
    parts = [choices.part_of(grid, f"{number}/3") for number in (1, 2, 3)]
    assert parts[1][:2] == [grid[1], grid[4]]
    assert sorted(entry for part in parts for entry in part) == sorted(grid)
    for text in ("0/3", "4/3", "1", "1/0", "a/b", "-1/3"):
        with pytest.raises(InputError, match="give i/n"):
            choices.part_of(grid, text)
    grid = choices.grid()
    assert len(grid) == len(set(grid)) >= 40
    assert {entry.batch for entry in grid} >= {1, 512}
    assert {entry.hidden for entry in grid} >= {128, 1024}
    assert {entry.length for entry in grid} == {5, 25, 100}
    assert {entry.dtype for entry in grid} == {"float32", "bfloat16"}
    assert max(entry.operations for entry in grid) <= choices.MOST_OPERATIONS


def test_the_summary_counts_also_in_parts(
    bench: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shapes = [
        dict(zip(GridEntry._fields, map(str, entry), strict=True))
        for entry in (*choices.grid()[:2], choices.grid()[-1])
    ]
    figures = [(0.0, 0.5, 0.2), (0.02, 0.0, 0.02), (0.1, 0.1, 0.1)]
    rows = [
        {
            "bench": "choices",
            "choice": "a",
            "best": "b",
            **shape,
            "regret": str(mine),
            "regret of the rule": str(rule),
            "regret with noise": str(noisy),
        }
        for shape, (mine, rule, noisy) in zip(shapes, figures, strict=True)
    ]
    *_, whole = choices.summary(rows)
    assert tuple(whole) == choices.SUMMARY
    expected = {"op": "all", "shapes": 3, "within 5 %": 2, "rule within 5 %": 1, "perhaps noise": 1}
    assert {name: whole[name] for name in expected} == expected
    figures_of_all = [whole[name] for name in ("largest regret", "mean regret", "largest regret of the rule")]
    assert figures_of_all == pytest.approx([0.1, 0.04, 0.5])
    assert whole["mean regret of the rule"] == pytest.approx(0.2)
    shape = " ".join(rows[2][name] for name in GridEntry._fields)
    assert whole["worst shape"] == f"{shape}: a chosen, b is best"
    assert [row["op"] for row in choices.summary(rows)] == [*dict.fromkeys(s["op"] for s in shapes), "all"]
    # Files are joined shape by shape; what was measured last counts.
    again = {**rows[0], "regret": "0.3"}
    assert choices.joined([rows[2], rows[0], {"bench": "layout"}, again]) == [again, rows[2]]
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path / "cache"))
    entries = [GridEntry("linear", batch, 2, 8, "float32") for batch in (1, 2, 3)]
    monkeypatch.setattr(choices, "grid", lambda: entries)
    files = [tmp_path / "1.csv", tmp_path / "2.csv"]
    for number, file in enumerate(files, 1):
        words = ("--part", f"{number}/2", "--csv", file, "--device", "cpu", "--threads", "1")
        ended = bench("choices", *words)
        assert ended.code == 0, ended.err
    rows = [[row["batch"] for row in csv.DictReader(file.read_text().splitlines())] for file in files]
    assert rows == [["1", "3"], ["2"]]
    ended = bench("choices", "--summary", *files)
    assert ended.code == 0, ended.err
    assert "linear" in ended.out
    assert bench("choices", "--summary", tmp_path / "no.csv").code == 2
