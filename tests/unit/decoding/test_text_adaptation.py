"""Adaptation of a language model to the text that it scores: neural cache and dynamic evaluation, by naive definitions."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from econmt.config.recipe import LanguageModelSection
from econmt.data.text.vocabulary import BOS, EOS, PAD
from econmt.decoding import text_reader
from econmt.decoding.dynamic_evaluation import EPSILON, DynamicEvaluation
from econmt.decoding.neural_cache import NeuralCache
from econmt.decoding.text_reader import TextReader
from econmt.errors import InputError
from econmt.model.language_model import LanguageModel

WORDS = 9
TEXT = [4, 5, 6, 4, 5, 7, 8, EOS, 4, 5, 6, 4, 4, 8, 8, EOS, 5, 6, 7]
"""Tokens whose scores are compared."""
TRAINING = ["4 5 6 7", "5 6", "8 8 4 5"]
"""Text of the statistics, 13 tokens with ends of lines."""


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


def reader(model: LanguageModel, **settings: object) -> TextReader:
    return TextReader(model, _Numbers(), torch.device("cpu"), torch.float32, **settings)  # type: ignore[arg-type]


def test_no_padding_and_no_beginning_is_written(model: LanguageModel) -> None:
    """However probable the model takes them for."""
    with torch.no_grad():
        model.output.bias.fill_(0.0)[[PAD, BOS]] = 50.0
    for top in (0, 3):
        written = list(reader(model.float()).write(50, temperature=1.0, top_k=top, seed=1))
        assert not {PAD, BOS}.intersection(written)
        assert len(set(written)) > 1


def scores(model: LanguageModel, parts: Sequence[int] = (len(TEXT),), **settings: object) -> list[float]:
    """Reads the text in parts of some lengths."""
    found, each, first = [], reader(model, **settings), 0
    for part in parts:
        found += each.read(TEXT[first : first + part])
        first += part
    assert first == len(TEXT)
    return found


def hidden_and_probabilities(model: LanguageModel) -> tuple[Tensor, Tensor]:
    inputs = torch.tensor([[EOS, *TEXT[:-1]]])
    with torch.no_grad():
        hidden = model(inputs)[0][0]
        logits = hidden @ model.output.weight.t() + model.output.bias
    return hidden, logits.softmax(1)


@pytest.mark.parametrize("size", [1, 5, 100])
def test_the_cache_is_that_of_the_definition(model: LanguageModel, size: int) -> None:
    hidden, probabilities = hidden_and_probabilities(model)
    expected = []
    for position, word in enumerate(TEXT):
        own = float(probabilities[position, word])
        before = range(max(0, position - size), position)
        weights = [math.exp(0.7 * float(hidden[position] @ hidden[other])) for other in before]
        same = [w for w, other in zip(weights, before, strict=True) if TEXT[other] == word]
        mixed = own if position == 0 else 0.8 * own + 0.2 * sum(same) / sum(weights)
        expected.append(math.log(mixed))
    cache = NeuralCache(size, 0.7, 0.2)
    for parts in ((19,), (1, 2, 3, 4, 9), (10, 9)):
        assert scores(model, parts, cache=cache) == pytest.approx(expected, rel=1e-9)


def test_the_cache_in_blocks(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NeuralCache(4, 1.0, 0.3)
    whole = scores(model, cache=cache)
    monkeypatch.setattr("econmt.decoding.neural_cache._VALUES", 21)  # two rows
    assert scores(model, (12, 7), cache=cache) == pytest.approx(whole, rel=1e-12)


def loss_of(model: LanguageModel, ids: list[int], state: object) -> tuple[Tensor, object]:
    """Returns the losses of tokens, the first of which is input alone, and the state."""
    hidden, state = model(torch.tensor([ids[:-1]]), state)
    logits = hidden[0] @ model.output.weight.t() + model.output.bias
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return losses, tuple(tuple(part.detach() for part in parts) for parts in state)  # type: ignore[attr-defined]


def naive_roots(model: LanguageModel, segment: int) -> list[Tensor]:
    """Returns the root mean square of the gradients of segments of the training text in one row or more."""
    text = [token for ids in _Numbers().encode_many(TRAINING) for token in (*ids, EOS)]
    rows = len(text) // segment or 1
    length = len(text) // rows
    squares, count, states = [torch.zeros_like(p) for p in model.parameters()], 0, [None] * rows
    for first in range(0, length, segment):
        total = torch.zeros(())
        tokens = 0
        for row in range(rows):
            begin = row * length + first
            end = min(begin + segment, (row + 1) * length)
            ids = [EOS, *text][begin : end + 1]
            losses, states[row] = loss_of(model, ids, states[row])  # type: ignore[call-overload]
            total, tokens = total + losses.sum(), tokens + len(losses)
        gradients = torch.autograd.grad(total / tokens, [*model.parameters()])
        squares = [s + g**2 for s, g in zip(squares, gradients, strict=True)]
        count += 1
    return [(s / count).sqrt() for s in squares]


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("segment", [3, 30])
def test_dynamic_evaluation_is_that_of_the_definition(
    model: LanguageModel, statistics: bool, segment: int
) -> None:
    rate, decay = (0.03, 0.4) if statistics else (0.5, 0.1)
    copied = copy.deepcopy(model)
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    roots = naive_roots(copied, segment) if statistics else []
    mean = sum(float(root.mean()) for root in roots) / len(trained)
    values, state, expected = trained, None, []
    text = [EOS, *TEXT]
    for first in range(0, len(TEXT), segment):
        ids = text[first : first + segment + 1]
        with torch.no_grad():
            for parameter, value in zip(copied.parameters(), values, strict=True):
                parameter.copy_(value)
        losses, state = loss_of(copied, ids, state)  # type: ignore[assignment]
        expected += [-float(loss.detach()) for loss in losses]
        gradients = torch.autograd.grad(losses.mean(), [*copied.parameters()])
        changed = []
        for number, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            back, divisor = torch.full_like(value, decay), torch.ones_like(value)
            if statistics:
                back, divisor = (decay * roots[number] / mean).clamp(max=1.0), roots[number] + EPSILON
            changed.append(value - rate * gradient / divisor + back * (trained[number] - value))
        values = changed
    dynamic = DynamicEvaluation(rate, decay, segment, TRAINING if statistics else None)
    before = scores(model)
    for parts in ((19,), (1, 2, 3, 4, 9)):
        assert scores(model, parts, dynamic=dynamic) == pytest.approx(expected, rel=1e-6)
    assert scores(model) == before, "the model itself has not changed"
    if segment == 3:
        assert scores(model, dynamic=dynamic) != pytest.approx(before, rel=1e-3)


def test_both_adapt_to_a_text_that_repeats_itself(model: LanguageModel) -> None:
    dynamic, cache = DynamicEvaluation(1.0, 0.0), NeuralCache(20, 4.0, 0.5)
    text = [4, 6, 8, 5, 7] * 40
    plain, adapted, cached, both = (
        -math.fsum(reader(model, **settings).read(text))
        for settings in ({}, {"dynamic": dynamic}, {"cache": cache}, {"dynamic": dynamic, "cache": cache})
    )
    assert both < min(adapted, cached)
    assert max(adapted, cached) < 0.9 * plain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NeuralCache(0), "size of the cache: expected a whole number from 1"),
        (lambda: NeuralCache(weight=1.0), "weight of the cache: expected a number below 1"),
        (lambda: NeuralCache(weight=0.0), "weight of the cache: expected a number from more than 0"),
        (lambda: NeuralCache(theta=-1.0), "theta of the cache: expected a number from 0"),
        (lambda: DynamicEvaluation(rate=0.0), "rate of dynamic evaluation: expected a number from more"),
        (lambda: DynamicEvaluation(decay=2.0), "decay of dynamic evaluation: expected a number from 0 to 1"),
        (lambda: DynamicEvaluation(segment=0), "segment of dynamic evaluation: expected a whole number"),
        (lambda: DynamicEvaluation(text=[""]), "the text for statistics of dynamic evaluation is empty"),
    ],
)
def test_settings_out_of_range(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


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


def test_float16_is_refused(model: LanguageModel) -> None:
    with pytest.raises(InputError, match="dynamic evaluation does not support float16"):
        TextReader(model, None, torch.device("cpu"), torch.float16, dynamic=DynamicEvaluation())  # type: ignore[arg-type]
