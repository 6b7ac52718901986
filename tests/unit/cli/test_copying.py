"""A model that copies from its recipe to its translations, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from econmt.checkpoint.tensor_files import read_tensors
from econmt.errors import InputError
from tests.unit.cli.conftest import SUBWORDS, Call
from tests.unit.training.tiny import Run, metrics, snapshot

COPIES = "model.decoder.copy_attention=true"
SOURCES = ["a b c", "h g h h", "b", "f e d c b a"]


def test_a_model_that_copies_goes_on_and_is_used(text: Path, tmp_path: Path, call: Call) -> None:
    """Interrupted or not it learns the same; translated, scored and quantized it has the same probabilities."""
    keys = (*SUBWORDS, COPIES, "training.label_smoothing=0.1", f"data.prepared={tmp_path / 'prepared'}")
    whole, parts = (Run(text, tmp_path / name, keys) for name in ("whole", "parts"))
    Run(text, tmp_path / "parts", (*keys, "training.max_updates=6")).train()
    parts.train()
    whole.train()
    assert snapshot(whole.folder) == snapshot(parts.folder)
    perplexities = [float(row["valid_perplexity"]) for row in metrics(whole.folder)]
    assert perplexities[-1] < perplexities[0]

    folder = whole.folder.path
    shown = call("translate", "-m", folder, "--output-type", "json", text="".join(f"{s}\n" for s in SOURCES))
    found = [json.loads(line) for line in shown.lines]
    pairs = "".join(
        f"{source}\t{' '.join(line['tokens'])}\n" for source, line in zip(SOURCES, found, strict=True)
    )
    for model, within in ((folder, 1e-4), (tmp_path / "int8", 0.2)):
        if not model.exists():
            assert call("quantize", "-m", folder, "-o", model, "--precision", "int8").code == 0
            assert "copying.weight.steps" not in read_tensors(model / "params.best.safetensors")[0]
        scored = call("score", "-m", model, "--target-tokens", text=pairs).lines
        expected = [line["log_probability"] for line in found]
        assert [float(score) for score in scored] == pytest.approx(expected, abs=within)

    refused = call("export", "--runtime", folder, tmp_path / "runtime")
    assert refused.code == 2
    assert "the runtime does not support its decoder.copy_attention" in refused.err


def test_copying_is_refused_where_it_cannot_be(text: Path, tmp_path: Path) -> None:
    for keys, message in {
        (): "model.decoder.copy_attention copies source tokens into the target and needs data.subwords.joint: true",
        (
            "data.subwords={type: bpe, size: 34, joint: false}",
        ): "model.decoder.copy_attention copies source tokens into the target and needs data.subwords.joint: true",
        (
            *SUBWORDS,
            "parallel.pipeline=2",
            "model.encoder.layers=2",
        ): "parallel.pipeline 2 cannot be combined with model.decoder.copy_attention",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            Run(text, tmp_path / "run", (*keys, COPIES))
