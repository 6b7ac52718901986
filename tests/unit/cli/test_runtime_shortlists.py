"""Shortlists of the runtime: each sentence has the words of its own list, whatever lists are beside it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import econmt_runtime
from econmt.export.model_folder import quantize_model
from econmt.export.runtime import export_runtime
from econmt_runtime.arrays import Table
from econmt_runtime.text import EOS
from econmt_runtime.translator import RuntimeTranslator
from tests.ops.test_native import LEVELS, Use
from tests.unit.cli.test_runtime import random_model

LINES = ["a b c", "h g", "d d d e a b c h g f e d c b a", "b", "e f a", "g c"]


@pytest.fixture(scope="module", params=["float32", "int8"])
def made(
    request: pytest.FixtureRequest, subword_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Runtime of a random model."""
    place = tmp_path_factory.mktemp("made")
    folder = random_model(subword_model, place / "model", "additive")
    if request.param == "int8":
        quantize_model(folder, place / "small")
        folder = place / "small"
    return export_runtime(folder, place / "runtime")


def load(made: Path, beam: int) -> RuntimeTranslator:
    """Loads a runtime, and makes the end of a translation less probable, so that some have several words."""
    translator = econmt_runtime.load(made, beam_size=beam, nbest_size=min(beam, 2))
    model = translator._model
    model._output_bias = model._output_bias - np.float32(3.0) * (np.arange(translator._size) == EOS)
    return translator


@pytest.mark.parametrize("beam", [1, 3])
def test_translations_are_those_of_an_output_layer_without_the_other_words(made: Path, beam: int) -> None:
    translator = load(made, beam)
    # Three words for each source word, and all words for "h".
    few = np.random.default_rng(1).integers(0, translator._size, (translator._source.size, 3))
    few[:4] = 0
    translator._lexicon = np.resize(few.T, (translator._size, len(few))).T.copy()
    translator._lexicon[translator._encode(["h g"], 1)[0][0]] = np.arange(translator._size)
    lists = [translator._allowed(np.array([[*ids, EOS]])) for ids in translator._encode(LINES, 1)]
    counts = [int(allowed.sum()) for allowed in lists if allowed is not None]
    assert len(set(counts)) > 3
    assert max(counts) == translator._size
    together = translator.translate(LINES)
    for line, allowed, found in zip(LINES, lists, together, strict=True):
        whole = load(made, beam)
        whole._model._output_bias = np.where(allowed[0], whole._model._output_bias, np.float32(-math.inf))
        expected = whole.translate([line])[0]
        assert [entry.text for entry in found.nbest] == [entry.text for entry in expected.nbest]
        scores = [entry.log_probability for entry in expected.nbest]
        assert [entry.log_probability for entry in found.nbest] == pytest.approx(scores, abs=1e-5)
    assert len({each.text for each in together}) > 4


def test_logits_are_those_of_float64(made: Path, use: Use) -> None:
    random = np.random.default_rng(2)
    weight, bias = random.normal(size=(77, 66)).astype(np.float32), random.normal(size=77).astype(np.float32)
    left, steps = random.normal(size=(6, 66)).astype(np.float32), None
    expected = left.astype(np.float64) @ weight.T.astype(np.float64) + bias
    model = econmt_runtime.load(made)._model
    if model._output._steps is not None:
        steps = np.abs(weight).max(1) / 127
        weight = np.rint(weight / steps[:, None]).astype(np.int8)
        rounding = np.abs(left).max(1, keepdims=True) / 127
        rounded = np.rint(left / rounding).astype(np.float64)
        expected = (rounded @ weight.T) * rounding * steps + bias
    model._output, model._output_bias = Table(weight, steps), bias
    allowed = random.random((5, 77)) < [[0.1], [1.0], [0.3], [0.5], [0.0]]
    allowed[:, :4] = True
    owners = np.array([0, 0, 0, 1, 3, 4])
    for _ in map(use, LEVELS):
        output = model.output_layer(allowed)
        assert output.size == 77
        found = output.product(left, owners)
        assert found.shape == (6, 77)
        for row, owner in enumerate(owners):
            own = np.flatnonzero(allowed[owner])
            assert output.words[owner].tolist() == [*own, *[0] * (77 - len(own))]
            np.testing.assert_allclose(found[row, : len(own)], expected[row, own], rtol=1e-5, atol=1e-5)
            assert (found[row, len(own) :] == -math.inf).all()
