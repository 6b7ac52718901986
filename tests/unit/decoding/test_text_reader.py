"""Reading of a text by a language model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from econmt.config.recipe import LanguageModelSection
from econmt.data.text.vocabulary import BOS, EOS, PAD
from econmt.decoding import text_reader
from econmt.decoding.text_reader import TextReader
from econmt.model.language_model import LanguageModel

WORDS = 9


class _Numbers:
    """Vocabulary in which each word is its id."""

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [str(each) for each in ids]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(3)
    values = {"embedding": 4, "size": [6, 4], "layers": 2, "weight_tying": "softmax"}
    model = LanguageModel(LanguageModelSection.model_validate(values), WORDS).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.8, 0.8)
    return model


def reader(model: LanguageModel) -> TextReader:
    return TextReader(model, _Numbers(), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]


def test_no_padding_and_no_beginning_is_written(model: LanguageModel) -> None:
    """However probable the model takes them for."""
    with torch.no_grad():
        model.output.bias.fill_(0.0)[[PAD, BOS]] = 50.0
    for top in (0, 3):
        written = list(reader(model.float()).write(50, temperature=1.0, top_k=top, seed=1))
        assert not {PAD, BOS}.intersection(written)
        assert len(set(written)) > 1


def test_lines_come_as_soon_as_they_are_read(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "WINDOW", 3)
    each, read = reader(model), []
    monkeypatch.setattr(each, "_read", lambda ids: read.append(ids) or TextReader._read(each, ids))
    lines = each.score(["4 5", "6 7", "8 8 4"])
    assert read == []
    assert len(next(lines).token_log_probabilities) == 3
    assert read == [[4, 5, EOS]]
    assert len(list(lines)) == 2
    assert [token for window in read for token in window] == [4, 5, EOS, 6, 7, EOS, 8, 8, 4, EOS]
