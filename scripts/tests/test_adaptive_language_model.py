"""Neural cache and dynamic evaluation, by naive definitions."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from econmt.config.recipe import LanguageModelSection
from econmt.data.text.vocabulary import EOS
from econmt.model.language_model import LanguageModel
from scripts.bench import adaptive_language_model
from scripts.bench.adaptive_language_model import EPSILON, DynamicUpdates, log_probabilities

WORDS = 9
TEXT = [4, 5, 6, 4, 5, 7, 8, EOS, 4, 5, 6, 4, 4, 8, 8, EOS, 5, 6, 7]
"""Tokens whose scores are compared."""
TRAINING = [4, 5, 6, 7, EOS, 5, 6, EOS, 8, 8, 4, 5, EOS]
"""Text of the statistics."""


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(3)
    values = {"embedding": 4, "size": [6, 4], "layers": 2, "weight_tying": "softmax"}
    model = LanguageModel(LanguageModelSection.model_validate(values), WORDS).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.8, 0.8)
    return model


def hidden_and_probabilities(model: LanguageModel) -> tuple[Tensor, Tensor]:
    inputs = torch.tensor([[EOS, *TEXT[:-1]]])
    with torch.no_grad():
        hidden = model(inputs)[0][0]
        logits = hidden @ model.output.weight.t() + model.output.bias
    return hidden, logits.softmax(1)


@pytest.mark.parametrize("size", [1, 5, 100])
def test_the_cache_is_that_of_the_definition(
    model: LanguageModel, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, probabilities = hidden_and_probabilities(model)
    expected = []
    for position, word in enumerate(TEXT):
        own = float(probabilities[position, word])
        before = range(max(0, position - size), position)
        weights = [math.exp(0.7 * float(hidden[position] @ hidden[other])) for other in before]
        same = [w for w, other in zip(weights, before, strict=True) if TEXT[other] == word]
        mixed = own if position == 0 else 0.8 * own + 0.2 * sum(same) / sum(weights)
        expected.append(math.log(mixed))
    for window in (100, 4):
        monkeypatch.setattr(adaptive_language_model, "WINDOW", window)
        found = log_probabilities(model, TEXT, torch.float64, segment=5, cache=(size, 0.7, 0.2))
        assert found.tolist() == pytest.approx(expected, rel=1e-9)


def loss_of(model: LanguageModel, ids: list[int], state: object) -> tuple[Tensor, object]:
    """Returns the losses of tokens, the first of which is input alone, and the state."""
    hidden, state = model(torch.tensor([ids[:-1]]), state)
    logits = hidden[0] @ model.output.weight.t() + model.output.bias
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return losses, tuple(tuple(part.detach() for part in parts) for parts in state)  # type: ignore[attr-defined]


def naive_roots(model: LanguageModel, segment: int) -> list[Tensor]:
    """Returns the root mean square of the gradients of segments of the training text in one row or more."""
    rows = len(TRAINING) // segment or 1
    length = len(TRAINING) // rows
    squares, count, states = [torch.zeros_like(p) for p in model.parameters()], 0, [None] * rows
    for first in range(0, length, segment):
        total = torch.zeros(())
        tokens = 0
        for row in range(rows):
            begin = row * length + first
            end = min(begin + segment, (row + 1) * length)
            ids = [EOS, *TRAINING][begin : end + 1]
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
    training = TRAINING if statistics else []
    updates = DynamicUpdates(model, rate, decay, segment, training, torch.float64)
    found = log_probabilities(model, TEXT, torch.float64, updates=updates, segment=segment)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
