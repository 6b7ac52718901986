"""``econmt quantize``, and the same numbers in 8 bits from ``econmt translate`` and the runtime."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import econmt_runtime
from econmt import api
from econmt.checkpoint.tensor_files import read_tensors, restored, write_tensors
from econmt.errors import InputError
from econmt.export.model_folder import quantize_model
from econmt.export.runtime import export_runtime
from econmt_memory.report.tables import format_bytes
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.cli.test_runtime import VARIANTS, assert_alike, random_model

ARRAYS = "arrays.safetensors"
PARAMETERS = "params.best.safetensors"
LINES = "a b c\nh g\nd d d e\n"


def test_int8_keeps_each_row_to_half_a_step(call: Call, word_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "int8"
    ended = call("quantize", "-m", word_model, "-o", made)
    assert (ended.code, ended.lines) == (0, [str(made)]), ended.err
    before, after = load_file(word_model / PARAMETERS), load_file(made / PARAMETERS)
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in (before, after)]
    told = f"{format_bytes(sizes[0])} became {format_bytes(sizes[1])}, {sizes[1] / sizes[0]:.1%}\n"
    assert ended.err == f"econmt: {told}"
    for name, tensor in before.items():
        if tensor.ndim == 1:
            np.testing.assert_array_equal(after[name], tensor)
            continue
        steps = after[f"{name}.steps"]
        assert after[name].dtype == np.int8
        np.testing.assert_allclose(np.abs(tensor).max(1), 127 * steps, rtol=1e-6)
        assert (np.abs(after[name] * steps[:, None] - tensor) <= 0.501 * steps[:, None]).all()
    found = json.loads(call("info", made, "--json").out)
    assert found["quantized"] == "int8"
    assert sum(found["parameters"]["layers"].values()) == sum(tensor.size for tensor in before.values())
    assert "its matrices in int8" in call("info", made).out


@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
def test_the_folder_is_a_usual_model(call: Call, word_model: Path, tmp_path: Path, precision: str) -> None:
    made, lean = tmp_path / "small", tmp_path / "lean"
    assert call("quantize", "-m", word_model, "-o", made, "--precision", precision).code == 0
    assert call("export", made, lean).code == 0
    assert (lean / PARAMETERS).read_bytes() == (made / PARAMETERS).read_bytes()
    outputs = [call("translate", "-m", folder, text=LINES).out for folder in (made, lean)]
    assert outputs[0] == outputs[1]
    scored = call("score", "-m", made, text="a b\tA B\n")
    whole = call("score", "-m", word_model, text="a b\tA B\n")
    assert float(scored.out) == pytest.approx(float(whole.out), abs=0.1)
    other = tmp_path / "other"
    call("quantize", "-m", word_model, "-o", other, "--precision", precision, "--checkpoint", 4).succeeded()
    assert (other / PARAMETERS).read_bytes() != (made / PARAMETERS).read_bytes()
    again = call("quantize", "-m", made, "-o", tmp_path / "again")
    assert f"its matrices are {precision} already" in again.err


def test_products_are_of_8_bits_where_the_folder_is(call: Call, word_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "int8"
    call("quantize", "-m", word_model, "-o", made)
    folders = [(made, "auto"), (made, "int8"), (word_model, "int8"), (word_model, "float32")]
    scores = []
    for folder, precision in folders:
        options = "--precision", precision, "--output-type", "score"
        ended = call("translate", "-m", folder, *options, text=LINES).succeeded()
        scores.append([float(line.partition("\t")[0]) for line in ended.lines])
    assert scores[0] == scores[1]
    assert scores[2] == pytest.approx(scores[0], abs=0.05)
    assert scores[3] == pytest.approx(scores[0], abs=0.1)
    assert scores[3] != scores[0]
    assert str(api.load(made, device="cpu").precision) == "torch.int8"
    assert str(api.load([made, word_model], device="cpu").precision) != "torch.int8"
    for precision in ("float32", None):
        tensors, _ = read_tensors(export_runtime(made, tmp_path / str(precision), precision) / ARRAYS)
        assert (torch.int8 in {tensor.dtype for tensor in tensors.values()}) == (precision is None)


def test_values_that_are_not_finite_are_refused(call: Call, copy: Path, tmp_path: Path) -> None:
    tensors, metadata = read_tensors(copy / PARAMETERS)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    for value in (math.nan, math.inf):
        tensors[name][1, 2] = value
        write_tensors(copy / PARAMETERS, tensors, metadata)
        ended = call("quantize -m", copy, "-o", tmp_path / "made")
        refused(ended, f"'{name}' holds values that are not finite; quantize another checkpoint")
        assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "steps",
    [None, torch.ones(1), torch.ones(2), torch.ones(4), torch.ones(3, 1), torch.ones(3, dtype=torch.float64)],
)
def test_every_row_has_a_scale(steps: torch.Tensor | None) -> None:
    """A single scale would be taken for all rows."""
    tensors = {"w": torch.ones(3, 2, dtype=torch.int8)} | ({} if steps is None else {"w.steps": steps})
    with pytest.raises(InputError, match="file: 'w' has no scales for its rows"):
        restored(tensors, Path("file"))
    whole = restored({**tensors, "w.steps": torch.tensor([1.0, 2.0, 3.0])}, Path("file"))
    assert list(whole) == ["w"]
    assert whole["w"].tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("stored", [True, False], ids=["quantized", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_translations_and_scores_are_equal(
    word_model: Path, tmp_path: Path, variant: str, stored: bool
) -> None:
    decoding = {"max_output_factor": 1.5, "beam_size": 4}
    folder = random_model(word_model, tmp_path / "model", variant, decoding)
    if stored:
        quantize_model(folder, tmp_path / "small")
        folder = tmp_path / "small"
    made = export_runtime(folder, tmp_path / "runtime", None if stored else "int8")
    choose = random.Random(1)
    lines = [" ".join(choose.choices("abcdefgh", k=choose.randint(1, 18))) for _ in range(220)]
    expected = api.load(folder, device="cpu", precision="int8").translate(lines)
    found = econmt_runtime.load(made).translate(lines)
    assert_alike(found, expected, rel=1e-12)
    assert len({each.score for each in found}) > 150
