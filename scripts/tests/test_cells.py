"""What `python -m scripts.bench cells` times is compared with float64 first, low-rank layers too."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.bench.rows import Row
from scripts.bench import cells
from scripts.bench.layers import Size
from scripts.tests.conftest import Measured
from tests.unit.cli.conftest import Call

CPU = torch.device("cpu")
ONE_TURN = ("--turns", "1")


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "has_compiler", lambda: False)


def test_layers_have_the_parameters_of_their_rank() -> None:
    size = Size(2, 3, 10)
    counts = [
        cells.Layer(cells.Kind("lstm", rank), size, torch.float32, CPU).parameters for rank in (0, 2, 3)
    ]
    assert counts == [2 * 400 + 40, 2 * 2 * 50 + 40, 2 * 3 * 50 + 40]
    assert cells.ways(cells.Kind("lstm", 2), torch.float32, "cpu") == ["recompute"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rank_layers_are_held_to_the_definition(dtype: torch.dtype) -> None:
    layer = cells.Layer(cells.Kind("lstm", 2), Size(2, 4, 6), dtype, CPU)
    expected = layer.passes("reference", exact=True)["both"]()
    assert expected[0].dtype == torch.float64
    assert layer.error("recompute", expected) < (1e-5 if dtype == torch.float32 else 0.05)
    assert layer.error("recompute", [1.2 * part for part in expected]) > 0.1


def test_rows_of_cells_and_ranks(measured: Measured, bench: Call) -> None:
    rows = measured("cells", *ONE_TURN, "--sizes", "2x3x6", "--cells", "lstm", "sru", "--ranks", "2")
    names = [row["layer"].split() for row in rows]
    assert names[0] == ["torch.nn.LSTM"]
    assert ["sru", "reference"] in names
    assert ["lstm", "2", "recompute"] in names
    for row in rows:
        assert min(row["milliseconds"], row["forward ms"]) > 0
        assert "failure" not in row
    options = (*ONE_TURN, "--cells", "lstm", "sru", "--ranks", "2", "3")
    rows = measured("cells", *options, "--sizes", "2x3x6", "1x2x4", "--only", "lstm 3", "sru ref")
    names = [(row["batch"], " ".join(row["layer"].split())) for row in rows]
    wanted = ["torch.nn.LSTM", "sru reference", "lstm 3 recompute"]
    assert names == [(batch, name) for batch in (2, 1) for name in wanted]
    assert bench("cells", "--sizes", "2x3x6", "--only", "cudnn").code == 2


def test_rows_are_kept_as_sizes_are_measured(
    bench: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What stops the second size leaves the rows of the first."""
    file, measure = tmp_path / "cells.csv", cells.measure

    def stopping(size: Size, *rest: Any) -> Iterator[Row]:
        if size.batch == 1:
            raise KeyboardInterrupt
        yield from measure(size, *rest)

    monkeypatch.setattr(cells, "measure", stopping)
    words = (*ONE_TURN, "--cells", "lstm", "--csv", file, "--sizes", "2x3x6", "1x3x6")
    assert bench("cells", *words).code == 130
    with file.open(newline="") as lines:
        assert {row["batch"] for row in csv.DictReader(lines)} == {"2"}


def test_an_implementation_that_is_wrong_has_no_time(
    monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    def wrong(self: cells.Layer, implementation: str, expected: list[Tensor]) -> float:
        return float("inf") if implementation == "recompute" else 0.0

    monkeypatch.setattr(cells.Layer, "error", wrong)
    rows = measured("cells", *ONE_TURN, "--sizes", "2x3x6", "--cells", "lstm", code=1)
    (row,) = (row for row in rows if row.get("failure") == "WRONG")
    assert row["layer"].split() == ["lstm", "recompute"]
    assert "milliseconds" not in row
