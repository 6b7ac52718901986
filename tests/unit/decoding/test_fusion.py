"""Language models read texts, and shallow fusion with them finds the best of all translations of a toy model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from econmt.config.recipe import LanguageModelSection
from econmt.data.text.vocabulary import BOS, EOS, PAD
from econmt.decoding import text_reader
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.fusion import ShallowFusion
from econmt.decoding.search.sampling import sample
from econmt.decoding.text_reader import TextReader
from econmt.model.language_model import LanguageModel
from tests.unit.decoding import toy
from tests.unit.decoding.test_search import step_by_step

WEIGHT = 0.8
SENTENCES = (0, 1, 2)
MODEL = toy.ToyModel(4, end_bias=1.0)


def fusion_of(cell: str = "lstm") -> ShallowFusion:
    torch.manual_seed(5)
    values = {"embedding": 3, "size": [5, 3], "layers": 2, "cell": cell}
    model = LanguageModel(LanguageModelSection.model_validate(values), toy.ToyModel.size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-2.0, 2.0)
    return ShallowFusion(model, WEIGHT, torch.float32)


def of_language_model(ids: tuple[int, ...], fusion: ShallowFusion) -> list[float]:
    """Returns the log-probabilities of the tokens and EOS, read as a line at the beginning of a text."""
    inputs = torch.tensor([[EOS, *ids]])
    with torch.no_grad():
        log_probs = fusion.model.log_probabilities(fusion.model(inputs)[0][0])
    return log_probs[torch.arange(len(ids) + 1), torch.tensor([*ids, EOS])].tolist()


@pytest.mark.parametrize("cell", ["lstm", "qrnn2"])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_every_step_is_as_the_definition_has_it(cell: str, beam_size: int) -> None:
    """Draws from one token are those of a beam of one."""
    fusion, limits = fusion_of(cell), [4, 2, 5]
    options = {"beam_size": beam_size, "nbest_size": beam_size, "repetition_penalty": 1.6}
    found = toy.search(MODEL, SENTENCES, limits, fusion=fusion, lm_weight=WEIGHT, **options)
    for sentence, limit, hypotheses in zip(SENTENCES, limits, found, strict=True):
        expected, _ = step_by_step(
            MODEL,
            sentence,
            limit,
            lambda ids: [WEIGHT * each for each in of_language_model(ids, fusion)],
            **options,
        )
        toy.assert_figures(hypotheses, expected)
    settings = SearchOptions(attention=False, lm_weight=WEIGHT, sample=1, repetition_penalty=1.6)
    drawn = sample(MODEL, *toy.sources(*SENTENCES), torch.tensor(limits), settings, [1, 2, 3], fusion)
    if beam_size == 1:
        assert [each[0].ids for each in drawn] == [each[0].ids for each in found]
        real = [each[0].log_probability for each in found]
        assert [each[0].log_probability for each in drawn] == pytest.approx(real, abs=1e-5)


VOCABULARY = 9


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
    model = LanguageModel(LanguageModelSection.model_validate(values), VOCABULARY).double().eval()
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
    texts = ["4 5", "6 7", "8 8 4"]
    lines = each.score(texts)
    assert read == []
    assert len(next(lines).token_log_probabilities) == 3
    assert read == [[4, 5, EOS]]
    rest = [line.token_log_probabilities for line in lines]
    assert [token for window in read for token in window] == [4, 5, EOS, 6, 7, EOS, 8, 8, 4, EOS]
    monkeypatch.setattr(text_reader, "WINDOW", 50)
    whole = [pytest.approx(line.token_log_probabilities, rel=1e-4) for line in reader(model).score(texts)]
    assert rest == whole[1:]
