"""``econmt translate --language-model``: against the Python interface, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import econmt
from econmt.api.translation import load_fusion
from econmt.errors import InputError
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.training.tiny_text import TextRun

INPUT = "a b c\n\nd\nh g f e d\n"


def train(text: Path, folder: Path, *subwords: str) -> Path:
    """Trains a language model of the target side; returns its folder."""
    short = ("training.max_updates=8", "training.optimizer.learning_rate=20.0")
    data = ("data.text=trg", *short, f"data.prepared={folder / 'text'}")
    run = TextRun(text, folder / "run", (*data, *subwords)).trained()
    return run.folder.path


@pytest.fixture(scope="module")
def language_model(text: Path, word_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = f"data.subwords={{type: words, lists: [{word_model / 'vocab.target.txt'}]}}"
    return train(text, tmp_path_factory.mktemp("language"), words)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(torch.int8, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_a_language_model_beside_8_bits_computes_in_float32(
    word_model: Path, language_model: Path, given: torch.dtype, expected: torch.dtype
) -> None:
    target = econmt.load(word_model, device="cpu").vocabularies.target
    found = load_fusion(language_model, 0.3, torch.device("cpu"), given, target, None)
    assert (found.weight, found.precision) == (0.3, expected)


def test_the_command_is_the_python_interface(call: Call, word_model: Path, language_model: Path) -> None:
    options = "translate --lm-weight 2 --beam-size 4 --nbest-size 3 --output-type json --language-model"
    told = call(options, language_model, "-m", word_model, text=INPUT).succeeded()
    model = econmt.load(word_model, device="cpu")
    search = {"beam_size": 4, "nbest_size": 3}
    fused = model.translate(INPUT.splitlines(), language_model=language_model, lm_weight=2.0, **search)
    plain = model.translate(INPUT.splitlines(), **search)
    for line, each in zip(told.lines, fused, strict=True):
        record = json.loads(line)
        assert record["translation"] == each.text
        assert record["score"] == pytest.approx(each.score, abs=1e-4)
    assert [each.text for each in fused] != [each.text for each in plain]
    # The log-probability is the translation model's; the score has the language model's, too.
    reader = econmt.load(language_model, device="cpu")
    for source, each in zip(INPUT.splitlines(), fused, strict=True):
        if source:
            of_model = model.score([source], [each.text])[0].log_probability
            assert each.log_probability == pytest.approx(of_model, abs=1e-4)
            added = reader.score([each.text])[0].log_probability
            assert each.score == pytest.approx((of_model + 2.0 * added) / (len(each.tokens) + 1), abs=1e-4)
    unweighted = model.translate(INPUT.splitlines(), language_model=language_model, lm_weight=0.0, **search)
    assert [each.score for each in unweighted] == [each.score for each in plain]
    usual = model.translate(["a b"], language_model=language_model)[0].score
    assert usual == model.translate(["a b"], language_model=language_model, lm_weight=0.2)[0].score


def test_subwords_of_the_translation_model(text: Path, subword_model: Path, tmp_path: Path) -> None:
    file = subword_model / "subwords.model"
    folder = train(text, tmp_path, f"data.subwords={{type: bpe, models: [{file}]}}")
    model = econmt.load(subword_model, device="cpu")
    assert model.translate(["a b"], language_model=folder, lm_weight=0.5)[0].hypotheses


def test_what_is_refused(
    call: Call,
    text: Path,
    word_model: Path,
    subword_model: Path,
    language_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = train(text, tmp_path, "data.subwords={type: words, size: 9}")
    told, vocabulary = (
        call("translate -m", word_model, "--language-model", other),
        word_model / "vocab.target.txt",
    )
    assert told.out == ""
    refused(
        told,
        f"{other / 'vocab.txt'}: differs from {vocabulary}, whose tokens a language model must have; train the "
        f"language model with data.subwords.lists: [{vocabulary}]",
    )
    with pytest.raises(InputError, match="lm_weight has no effect without language_model"):
        econmt.load(word_model, device="cpu").translate(["a"], lm_weight=0.5)
    with pytest.raises(InputError, match="cannot be combined with restrict_lexicon"):
        econmt.load(word_model).translate(["a"], language_model=language_model, restrict_lexicon="l")
