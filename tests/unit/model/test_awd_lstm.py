"""AWD-LSTM against an independent implementation in plain PyTorch: loss, penalties, gradients, states, first values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from econmt.config.recipe import LanguageModelSection
from econmt.model import Implementations
from econmt.model.activation_penalties import ActivationPenalties
from econmt.model.language_model import LanguageModel
from econmt_ops.products.dropout import Seed, keep_mask

WORDS, ROWS, STEPS, WIDTHS = 13, 3, 5, [7, 6, 4]
CPU = torch.device("cpu")
DROPOUT = dict.fromkeys(("embedding", "inputs", "layers", "output"), 0.25)
DROPOUT |= {"weights": 0.5, "variational": True}
PENALTIES = ActivationPenalties(2.0, 1.0)
States = list[tuple[Tensor, Tensor]]


def make(**changes: object) -> LanguageModel:
    values = {"embedding": 4, "size": WIDTHS, "layers": 3, "weight_tying": "softmax", "dropout": DROPOUT}
    values |= {"initialization": {"weights": "torch", "embedding_scale": 0.1}, **changes}
    torch.manual_seed(2)
    return LanguageModel(LanguageModelSection.model_validate(values), WORDS, rows=ROWS).double().train()


def scaled(shape: tuple[int, ...], probability: float, seed: Seed | None, index: int = -1) -> Tensor:
    """Returns the factors by which dropout multiplies."""
    return keep_mask(shape, probability, seed, CPU, index).double() / (1.0 - probability)


def plain_loss(
    model: LanguageModel, window: tuple[Tensor, Tensor], state: States, penalties: ActivationPenalties
) -> tuple[Tensor, States]:
    """Computes the loss of a token as the paper has it, with the masks of the seeds that the model would draw now."""
    seeds, (inputs, targets) = model.draw_seeds(), window
    table = model.embedding.weight * scaled((WORDS,), 0.25, seeds.words)[:, None]
    raw = table[inputs] * scaled((ROWS, 1, 4), 0.25, seeds.inputs)
    after = []
    for number, layer in enumerate(model.layers):
        if number:
            raw = raw * scaled((ROWS, 1, raw.shape[2]), 0.25, seeds.layers, number)
        size = WIDTHS[number]
        mask = scaled((1, 4 * size, size), 0.5, seeds.weights[number])[0]
        values = {
            "weight_ih_l0": layer.input,
            "weight_hh_l0": layer.hidden * mask,
            "bias_ih_l0": layer.bias,
            "bias_hh_l0": torch.zeros_like(layer.bias),
        }
        lstm = nn.LSTM(raw.shape[2], size, batch_first=True).double()
        h, c = state[number]
        raw, (h, c) = functional_call(lstm, values, (raw, (h[None], c[None])))
        after.append((h[0].detach(), c[0].detach()))
    dropped = raw * scaled((ROWS, 1, 4), 0.25, seeds.output)
    logits = nn.functional.linear(dropped, model.embedding.weight, model.output.bias)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = loss + penalties.activation * dropped.pow(2).mean()
    return loss + penalties.temporal * (raw[:, 1:] - raw[:, :-1]).pow(2).mean(), after


@pytest.mark.parametrize("name", ["auto", "reference", "recompute"])
def test_two_windows_are_those_of_the_plain_implementation(name: str) -> None:
    model = make()
    torch.manual_seed(3)
    ids = torch.randint(4, WORDS, (ROWS, 2 * STEPS + 1))
    rows, how = torch.arange(1, ROWS + 1), Implementations.everywhere(name)
    state = [(torch.zeros(ROWS, size).double(), torch.zeros(ROWS, size).double()) for size in WIDTHS]
    parameters = list(model.parameters())
    for first in (0, STEPS):
        window = ids[:, first : first + STEPS], ids[:, first + 1 : first + STEPS + 1]
        torch.manual_seed(first)
        expected, state = plain_loss(model, window, state, PENALTIES)
        wanted = torch.autograd.grad(expected, parameters)
        torch.manual_seed(first)
        carries = torch.full_like(rows, first > 0)
        # The model's loss is float32, which its gradients are not.
        found = model.loss(*window, rows, carries, 0.0, how, PENALTIES) / (ROWS * STEPS)
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        for gradient, want in zip(torch.autograd.grad(found, parameters), wanted, strict=True):
            torch.testing.assert_close(gradient, want, rtol=1e-7, atol=1e-10)
        for got, want in zip(model.unpack_states(model.carried[:, :, 1:]), state, strict=True):
            torch.testing.assert_close(got, want)
    assert model.carried.shape == (2, 3, 1 + ROWS, 7)


def test_penalties_count_valid_positions_and_vanish_in_evaluation() -> None:
    torch.manual_seed(4)
    outputs = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]])

    def loss(values: Tensor) -> Tensor:
        return ActivationPenalties(0.5, 3.0).loss(values, 2.0 * values, valid)

    squares = (2.0 * outputs)[valid].square().sum() * 0.5 / 3
    pairs = outputs.diff(dim=1).square()
    expected = squares + (pairs[0].sum() + pairs[1, 0].sum()) * 3.0 / 3 * 4 / 3
    torch.testing.assert_close(loss(outputs), expected)
    assert torch.autograd.gradcheck(loss, outputs)
    assert float(ActivationPenalties(0.0, 1.0).loss(outputs[:, :1], outputs[:, :1], valid[:, :1])) == 0.0
    model = make().eval()
    ids, rows = torch.full((ROWS, 3), 5), torch.arange(1, ROWS + 1)
    without, with_both = (model.loss(ids, ids, rows, 0 * rows, penalties=each) for each in (None, PENALTIES))
    assert torch.equal(without, with_both)


def _within(bound: float, *tensors: Tensor) -> bool:
    """True if the values fill the interval up to its bounds."""
    return all(0.9 * bound < float(tensor.detach().abs().max()) <= bound for tensor in tensors)


def test_first_values_and_widths() -> None:
    model = make(size=[60, 60, 40], embedding=40)
    for layer, size in zip(model.layers, (60, 60, 40), strict=True):
        bound = 1.0 / math.sqrt(size)
        assert _within(bound, layer.input, layer.hidden)
        assert bound < float(layer.bias.detach().abs().max()) <= 2.0 * bound  # the sum of two biases
    assert _within(0.1, model.embedding.weight)
    uniform = {"weights": "uniform", "scale": 0.3, "embedding_scale": 0.1}
    assert _within(0.1, make(initialization=uniform, weight_tying="none").embedding.weight)
    assert float(model.output.bias.detach().abs().max()) == 0.0
    for message, changes in {
        "size has 2 widths and layers is 3; give one width for each layer": {"size": [7, 6]},
        "weight_tying softmax needs the last width of size, 4, equal to embedding 5": {"embedding": 5},
        "the last width of size, 7, equal to embedding 4": {"size": [4, 6, 7]},
        "greater than or equal to 1": {"size": [7, 0, 4]},
    }.items():
        with pytest.raises(ValueError, match=message):
            make(**changes)

    def loss(size: object) -> Callable[[], Tensor]:
        model = make(size=size, weight_tying="none")
        ids, rows = torch.arange(4, 10).view(3, 2), torch.arange(1, ROWS + 1)
        return lambda: model.loss(ids, ids, rows, 0 * rows)

    one, listed = loss(6), loss([6, 6, 6])
    torch.manual_seed(5)
    expected = one()
    torch.manual_seed(5)
    assert torch.equal(listed(), expected)
