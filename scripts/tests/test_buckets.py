"""The table of what padding costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.buckets import COLUMNS, MOST, WIDTHS
from scripts.tests.conftest import Measured
from tests.unit.cli.conftest import Call
from tests.unit.training.tiny import write_recipe, write_text


@pytest.mark.parametrize("batch", ["{type: sentence, size: 4}", "{type: word, size: 40}"])
def test_every_way_of_making_batches_has_a_row(tmp_path: Path, measured: Measured, batch: str) -> None:
    write_text(tmp_path, {"train": 60, "valid": 6})
    recipe = write_recipe(tmp_path / "reverse.yaml", tmp_path, tmp_path / "run")
    rows = measured("buckets", recipe, f"training.batch={batch}", "--data-dir", tmp_path)
    assert len(rows) == 2 + len(WIDTHS) + len(MOST) + 1
    for row in rows:
        assert tuple(row) == COLUMNS
        assert int(row["shapes if cut"]) >= 1, row
        cut = float(row["cut"].strip("+ %"))
        assert cut >= 0.0, row
        if row["shapes"]:
            assert float(row["padded"].strip("+ %")) >= cut, row


def test_a_language_model_has_no_pairs(bench: Call) -> None:
    ended = bench("buckets", "ptb")
    assert ended.code == 2
    assert ended.err == (
        "buckets: ptb: a language model's text has no pairs and no buckets; give a recipe of translation\n"
    )
