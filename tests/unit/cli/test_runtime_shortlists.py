"""Shortlists: ``econmt lexicon``, ``--restrict-lexicon``, and those of the runtime, a list a sentence."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import econmt_runtime
from econmt.data.text.subwords import fingerprint, load_vocabularies
from econmt.export.lexicon import read_lexicon, write_lexicon
from econmt.export.model_folder import quantize_model
from econmt.export.runtime import export_runtime
from econmt_runtime.arrays import Table
from econmt_runtime.text import EOS
from econmt_runtime.translator import RuntimeTranslator
from tests.ops.test_native import LEVELS, Use
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
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
    few[1:4] = 0
    translator._lexicon = np.resize(few.T, (translator._size, len(few))).T.copy()
    translator._lexicon[translator._encode(["h g"], 1)[0][0]] = np.arange(translator._size)
    lists = [translator._allowed(np.array([[*ids, EOS]])) for ids in translator._encode(LINES, 1)]
    counts = [int(allowed.sum()) for allowed in lists if allowed is not None]
    assert len(set(counts)) > 3
    assert max(counts) == translator._size
    assert translator.config["joint"]
    for ids, allowed in zip(translator._encode(LINES, 1), lists, strict=True):
        assert allowed[0, [*ids, *few[ids].flat]].all()
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


def test_a_lexicon_is_learnt_and_restricts(call: Call, word_model: Path, text: Path, tmp_path: Path) -> None:
    made = tmp_path / "lexicon"
    ended = call("lexicon", "-m", word_model, "-o", made, "--data-dir", text, "-k", 4)
    assert (ended.code, ended.lines) == (0, [str(made)]), ended.err
    vocabularies = load_vocabularies(word_model)
    table = read_lexicon(made, fingerprint(word_model), vocabularies)
    assert table.shape == (vocabularies.source.size, 4)
    assert not table[3].any()
    lines = "a b c\nh g\n"
    options = "--restrict-lexicon", made, "--restrict-lexicon-topk", 1, "--beam-size", 3
    found = call("translate", "-m", word_model, *options, text=lines).succeeded()
    for line, translation in zip(lines.split("\n"), found.lines, strict=False):
        ids = [*vocabularies.source.encode(line), 2, 3]
        assert {*vocabularies.target.encode(translation)} <= {*table[ids, :1].flatten().tolist(), 1}


def test_a_lexicon_of_another_model_or_none_is_refused(
    call: Call, word_model: Path, subword_model: Path, tmp_path: Path
) -> None:
    vocabularies = load_vocabularies(word_model)
    wrong = tmp_path / "wrong"
    for rows, value, model, message in (
        (vocabularies.source.size, 0, subword_model, "belongs to another vocabulary"),
        (3, 0, word_model, "a damaged lexicon (shape (3, 2))"),
        (vocabularies.source.size, 9999, word_model, "a damaged lexicon"),
    ):
        write_lexicon(wrong, torch.full((rows, 2), value).int(), fingerprint(model))
        refused(call("translate -m", word_model, "--restrict-lexicon", wrong), message)
    other = word_model / "params.best.safetensors"
    ended = call("translate -m", word_model, "--restrict-lexicon", other)
    refused(ended, "not a lexicon; use a file written by econmt lexicon")


def test_a_text_is_not_written_over(call: Call, word_model: Path, tmp_path: Path) -> None:
    for name, line in (("t.src", "a b"), ("t.trg", "A B"), ("u.src", "a"), ("u.trg", "A")):
        (tmp_path / name).write_text(f"{line}\n")
    (tmp_path / "link").hardlink_to(tmp_path / "u.trg")
    corpora = "--corpus", tmp_path / "t", "--corpus", tmp_path / "u"
    for name, read in (("t.src", "t.src"), ("t.trg", "t.trg"), ("link", "u.trg")):
        content = (tmp_path / name).read_bytes()
        ended = call("lexicon -m", word_model, *corpora, "-o", tmp_path / name)
        refused(ended, f"is also an input ({tmp_path / read})")
        assert (tmp_path / name).read_bytes() == content


def test_where_all_pairs_are_long_nothing_is_written(call: Call, word_model: Path, tmp_path: Path) -> None:
    for side in ("src", "trg"):
        (tmp_path / f"t.{side}").write_text("a " * 500 + "\n")
    ended = call("lexicon", "-m", word_model, "--corpus", tmp_path / "t", "-o", tmp_path / "made")
    refused(ended, "(data.max_length); give text with shorter sentences")
    assert not (tmp_path / "made").exists()
