"""Language models of every cell: against naive steps, with their states carried through a text, and learning."""

from __future__ import annotations

import pytest
import torch

from econmt.config.stacks import CELLS
from econmt.model import Implementations
from tests.ops.cases import CELLS as DEFINED
from tests.unit.model.test_language_model import loss_of, make, tokens

OTHERS = [name for name in CELLS if name != "lstm"]
NAIVE = {"qrnn2": "qrnn-2", "lnglstm": "lnlstm-per-gate"}
"""Names in the tests of the operations where they differ."""


@pytest.mark.parametrize("name", ["auto", "reference", "recompute"])
@pytest.mark.parametrize("cell", OTHERS)
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
