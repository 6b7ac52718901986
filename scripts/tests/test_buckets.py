"""``python -m scripts.bench buckets``: the table of what padding costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.buckets import MOST, WIDTHS, main
from tests.unit.training.tiny import write_recipe, write_text


@pytest.mark.parametrize("batch", ["{type: sentence, size: 4}", "{type: word, size: 40}"])
def test_every_way_of_making_batches_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: str
) -> None:
    write_text(tmp_path, {"train": 60, "valid": 6})
    recipe = write_recipe(tmp_path / "reverse.yaml", tmp_path, tmp_path / "run")
    told = main([str(recipe), f"training.batch={batch}", "--data-dir", str(tmp_path)])
    captured = capsys.readouterr()
    assert told == 0, captured.err
    head, _, columns, _, *rows = captured.out.splitlines()
    assert head.startswith("reverse: 60 pairs of ")
    names = [cell.strip() for cell in columns.strip("|").split("|")]
    assert names == [
        "batches",
        "shapes",
        "padded to buckets",
        "shapes if cut",
        "cut to the longest pair",
        "again together",
    ]
    assert len(rows) == 2 + len(WIDTHS) + len(MOST) + 1
    for row in rows:
        cells = dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
        assert int(cells["shapes if cut"]) >= 1, row
        cut = float(cells["cut to the longest pair"].strip("+ %"))
        assert cut >= 0.0, row
        if cells["shapes"]:
            assert float(cells["padded to buckets"].strip("+ %")) >= cut, row


def test_a_language_model_has_no_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ptb"]) == 2
    assert capsys.readouterr().err == (
        "buckets: ptb: a language model's text has no pairs and no buckets; give a recipe of translation\n"
    )
