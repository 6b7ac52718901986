"""The notebook of docs/ runs from top to bottom, without Jupyter and with a small model."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "tour.ipynb"
LARGEST_OUTPUT = 15_000
"""Bytes of the outputs of a cell."""
SMALL = {
    "model.embedding": 6,
    "model.encoder.size": 8,
    "model.decoder.size": 8,
    "model.attention.size": 5,
    "training.checkpoint_interval": 2,
    "training.device": "cpu",
    "decoding.beam_size": 3,
    "training.decode_and_evaluate": 4,
}


def cells(kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    said = []
    for number, cell in enumerate(cells("code")):
        source = "".join(cell["source"])
        small = source.replace('"training.max_updates": 1200', f'**{SMALL}, "training.max_updates": 4')
        small = small.replace('"training.max_updates": 2,', f'**{SMALL}, "training.max_updates": 2,')
        assert (small != source) == ("econmt.train(" in source)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(small, f"{NOTEBOOK.name} cell {number}", "exec"), namespace)
        said.append(printed.getvalue())
    assert "max_updates 4 reached | best checkpoint:" in said[0]
    assert "<TrainedModel quickstart: en to de, 1 x lstm 8" in said[1]
    assert "log-probability: -" in said[2]
    assert namespace["axes"].images[0].get_array().shape == namespace["best"].attention.shape
    plain, own = (line for line in said[-1].splitlines() if "peak" in line)
    assert plain.startswith("plain PyTorch: peak ")
    assert own.startswith("econmt: peak ")


def test_the_notebook_is_small_and_has_outputs() -> None:
    code = cells("code")
    assert all(len(json.dumps(cell["outputs"])) < LARGEST_OUTPUT for cell in code)
    assert all(cell["outputs"] for cell in code)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    text = "".join("".join(cell["source"]) for cell in cells("markdown"))
    for title in ("## Train", "## Translate", "## Attention", "## Memory"):
        assert title in text
