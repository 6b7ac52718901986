"""The language model's parts, and models of every cell against naive steps: states, dropped weights, tied tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.config.recipe import LanguageModelSection
from econmt.config.stacks import CELLS
from econmt.model import Implementations
from econmt.model.language_model import LanguageModel
from econmt.model.layers import drawing_from
from tests.ops.cases import CELLS as DEFINED

SIZE = 11


def make(**changes: object) -> LanguageModel:
    values = {"embedding": 5, "size": 4, "layers": 2, **changes}
    torch.manual_seed(2)
    return LanguageModel(LanguageModelSection.model_validate(values), SIZE, rows=3).double().train()


def tokens(count: int, rows: int = 3) -> Tensor:
    """Rows of ids, of which each but the last is read, and each but the first a target."""
    torch.manual_seed(3)
    return torch.randint(4, SIZE, (rows, count + 1))


def loss_of(model: LanguageModel, ids: Tensor, carries: int = 1, **how: Implementations) -> Tensor:
    rows = torch.arange(1, len(ids) + 1)
    return model.loss(ids[:, :-1], ids[:, 1:], rows, torch.full_like(rows, carries), **how)


@pytest.mark.parametrize("cell", ["lstm", "gru", "lnlstm", "lnglstm", "gilr_lstm"])
def test_weight_drop_drops_recurrent_matrices_alone(cell: str) -> None:
    model = make(cell=cell, dropout={"embedding": 0.5, "weights": 0.5}, size=40)

    def weights() -> list[Any]:
        seeds = model.draw_seeds()
        return [model.weights_of(number, seeds) for number in range(2)]

    for each, layer in zip(weights(), model.layers, strict=True):
        assert all(getattr(each, name) is getattr(layer, name) for name in each._fields if name != "hidden")
        dropped = each.hidden == 0.0
        assert 0.4 < float(dropped.double().mean()) < 0.6
        torch.testing.assert_close(each.hidden[~dropped], 2.0 * layer.hidden[~dropped])
        gradient = torch.autograd.grad(each.hidden.sum(), layer.hidden)[0]
        torch.testing.assert_close(gradient, torch.where(dropped, 0.0, 2.0).double())
    masks = [weights()[0].hidden == 0.0 for _ in range(2)]
    assert not torch.equal(*masks)
    for first_row in (0, 3):  # as in a process that has the rows from the fourth on
        torch.manual_seed(5)
        with drawing_from(None, first_row):
            masks[first_row // 3] = weights()[1].hidden == 0.0
            assert type(model.draw_seeds().words) is int, "the words of a rank are those of all ranks"
    assert torch.equal(*masks), "all processes of a run drop the same weights"
    ids = tokens(4)
    assert not torch.equal(loss_of(model, ids, 0), loss_of(model, ids, 0))
    model.eval()
    assert all(torch.equal(w.hidden, layer.hidden) for w, layer in zip(weights(), model.layers, strict=True))


def test_evaluation_and_padding_change_nothing() -> None:
    model = make()
    loss_of(model, tokens(4), carries=0)
    before = model.carried.clone()
    model.eval()
    for rows in (2, 3):  # the buffer of evaluation grows
        alone = loss_of(make().eval(), tokens(5, rows), carries=0)
        assert torch.equal(loss_of(model, tokens(5, rows), carries=0), alone)
    assert torch.equal(model.carried, before)
    model = make()
    expected = loss_of(model, tokens(4), carries=0)
    left = model.carried.clone()
    ids = torch.cat([tokens(4), torch.zeros(2, 5, dtype=torch.int64)])
    rows = torch.tensor([1, 2, 3, 0, 0])
    found = model.loss(ids[:, :-1], ids[:, 1:], rows, torch.tensor([0, 0, 0, 0, 0]))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.carried[:, :, 1:4], left[:, :, 1:4])
    loss_of(model, tokens(4, rows=6))
    assert model.carried.shape == (2, 2, 7, 4)


def test_tied_tables_of_another_width_have_a_linear_layer_between() -> None:
    model = make(weight_tying="softmax")
    assert model.output.weight is model.embedding.weight
    assert model.readout is not None
    assert make(weight_tying="softmax", embedding=4).readout is None
    assert {*model.parameter_layers().values()} == {"embedding", "decoder", "output"}


NAIVE = {"qrnn2": "qrnn-2", "lnglstm": "lnlstm-per-gate"}
"""Names in the tests of the operations where they differ."""


@pytest.mark.parametrize("name", ["auto", "reference", "recompute"])
@pytest.mark.parametrize("cell", [name for name in CELLS if name != "lstm"])
def test_windows_with_carried_states_are_naive_steps(cell: str, name: str) -> None:
    model = make(cell=cell, size=[6, 7])
    case = DEFINED[NAIVE.get(cell, cell)]
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.7, 0.7)
    ids = tokens(9)
    expected = torch.zeros(()).double()
    for row in ids:
        states = [
            tuple(torch.zeros(width).double() for width in case.states(read, size))
            for read, size in ((5, 6), (6, 7))
        ]
        for position in range(9):
            value = model.embedding.weight[row[position]]
            for number, layer in enumerate(model.layers):
                value, states[number] = case.step(value, layer.weights, states[number])
            scores = model.output.weight @ value + model.output.bias
            expected = expected - scores.log_softmax(0)[row[position + 1]]
    how = Implementations.everywhere(name)
    parts = [
        loss_of(model, ids[:, first : last + 1], int(first > 0), implementations=how)
        for first, last in ((0, 4), (4, 5), (5, 9))
    ]
    assert float(sum(parts).detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    model.zero_grad()
    whole = loss_of(model, ids, 0, implementations=how)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(expected, parameters)
    for found, gradient in zip(torch.autograd.grad(whole, parameters), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-9)
