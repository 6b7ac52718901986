"""A model of other cells through the command line: resumed, shown, translated with, scored, and not compressed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Call
from tests.unit.training.tiny import Run

CELLS = (
    "model.encoder={cell: gru, size: 8, layers: 2}",
    "model.decoder={cell: ssru, size: 8, layers: 2, input_feeding: false, residual: true}",
    "training.max_updates=6",
    "training.checkpoint_interval=3",
)
FEEDING = (
    "model.decoder={cell: gru, size: 8, layers: 2, context_gating: true}",
    "model.layer_normalization=true",
    "model.attention.coverage={type: gru, num_hidden: 2}",
    "training.max_updates=6",
    "training.checkpoint_interval=3",
)
SOURCES = ["a b c", "d", "h g f e d c"]


@pytest.fixture(scope="module")
def model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run that stopped after three of its six updates and was resumed."""
    folder = tmp_path_factory.mktemp("cells") / "run"
    Run(text, folder, (*CELLS[:2], "training.max_updates=3", CELLS[3])).train()
    Run(text, folder, CELLS).train()
    return folder


def test_resumed_equals_uninterrupted(model: Path, text: Path, tmp_path: Path) -> None:
    Run(text, tmp_path / "run", CELLS).train()
    name = "params.00006.safetensors"
    assert (model / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


@pytest.mark.parametrize("feeding", [False, True])
def test_scores_agree_with_the_translator(
    call: Call, model: Path, text: Path, tmp_path: Path, feeding: bool
) -> None:
    if feeding:
        model = tmp_path / "feeding"
        Run(text, model, FEEDING).train()
    lines = "".join(source + "\n" for source in SOURCES)
    found = [
        json.loads(line) for line in call("translate", "-m", model, "--output-type", "json", text=lines).lines
    ]
    pairs = "".join(
        f"{source}\t{' '.join(line['tokens'])}\n" for source, line in zip(SOURCES, found, strict=True)
    )
    scores = call("score", "-m", model, "--target-tokens", "--score-type", "logprob", text=pairs).lines
    assert [float(score) for score in scores] == pytest.approx(
        [line["log_probability"] for line in found], abs=1e-4
    )


def test_info_names_the_cells(call: Call, model: Path) -> None:
    said = call("info", model).out
    assert "2 x GRU 8, both directions: bottom" in said
    assert "2 x SSRU 8, no input feeding" in said
