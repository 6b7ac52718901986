"""In 8 bits ``econmt translate`` and the runtime compute the same numbers, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import econmt_runtime
from econmt import api
from econmt.export.model_folder import quantize_model
from econmt.export.runtime import export_runtime
from tests.unit.cli.test_runtime import VARIANTS, assert_alike, random_model


def some_lines(count: int) -> list[str]:
    """Lines of one to eighteen random words."""
    choose = random.Random(1)
    return [" ".join(choose.choices("abcdefgh", k=choose.randint(1, 18))) for _ in range(count)]


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
    made = export_runtime(folder, tmp_path / "runtime", "int8")
    lines = some_lines(220)
    expected = api.load(folder, device="cpu", precision="int8").translate(lines)
    found = econmt_runtime.load(made).translate(lines)
    assert_alike(found, expected, rel=1e-12)
    assert len({each.score for each in found}) > 150
