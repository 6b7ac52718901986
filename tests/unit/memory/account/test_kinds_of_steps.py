"""Predictions for a CPU equal what kinds of steps take whose memory depends on values, or on what autograd does."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import econmt_memory as memory
from econmt_memory.account.reachable import reachable
from tests.unit.memory.account.test_programs import measured


def recognize(*, concatenated: bool = False, **settings: Any) -> Callable[[nn.Module], Tensor]:
    """CTC loss of 6 sequences; lengths are tensors, or tuples where targets are concatenated."""
    inputs, targets, lengths = torch.randn(50, 6, 32), torch.randint(1, 16, (6, 20)), (9, 12, 7, 15, 11, 8)
    of_inputs, of_targets = torch.full((6,), 50), torch.tensor(lengths)
    if concatenated:
        targets = torch.cat([row[:length] for row, length in zip(targets, lengths, strict=True)])
    loss = nn.CTCLoss(**settings)
    given = ((50,) * 6, lengths) if concatenated else (of_inputs, of_targets)
    return lambda model: loss(model(inputs).log_softmax(-1), targets, *given)


def over_packed(model: nn.Module) -> Tensor:
    inputs, lengths = torch.ones(6, 9, 32), torch.tensor([4, 9, 7, 7, 2, 5])
    packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    outputs, lengths = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True, total_length=40)
    return outputs[:, : int(lengths.max())].square().mean()


def over_edges(model: nn.Module) -> Tensor:
    nodes, edges = torch.ones(300, 32), torch.arange(4000).view(2, 2000) % 300
    for _ in range(2):
        sums = torch.zeros_like(nodes).index_add(0, edges[1], nodes.index_select(0, edges[0]))
        most = torch.zeros_like(nodes).scatter_reduce(
            0, edges[1, :, None].expand(-1, 32), nodes[edges[0]], "amax"
        )
        nodes = functional.relu(model(sums)) + nodes.gather(0, edges[0, :300, None].expand(-1, 32)) + most
    return nodes.square().sum()


def residual(model: nn.Module) -> Tensor:
    inputs = model(torch.ones(256, 32))
    return (inputs + inputs.sin() + inputs.cos() + inputs[:, :8].exp().sum(1, keepdim=True)).sum()


def recomputed(model: nn.Module) -> Tensor:
    inputs = torch.ones(16, 32, requires_grad=True)
    for _ in range(12):
        inputs = checkpoint(model, inputs, use_reentrant=False)
    return inputs.sum()


def without_backward_pass(layer: nn.Module) -> Tensor:
    """An LSTM that reads, of which nothing is kept."""
    with torch.no_grad():
        states = layer(torch.ones(8, 20, 32))[0]
    return states.mean() * next(layer.parameters()).sum()


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (nn.Linear(32, 16), recognize()),
        (nn.Linear(32, 16), recognize(concatenated=True, zero_infinity=True, reduction="sum")),
        (nn.LSTM(32, 16, num_layers=2, bidirectional=True, batch_first=True), over_packed),
        (nn.GRU(32, 16, batch_first=True), over_packed),
        (nn.RNN(32, 16, batch_first=True), over_packed),
        (nn.LSTM(32, 64, batch_first=True), without_backward_pass),
        (nn.Linear(32, 32), over_edges),
        (nn.Linear(32, 512), residual),
        (nn.Linear(32, 32), recomputed),
        *((nn.Sequential(nn.Linear(32, 512), kind), lambda model: model(torch.ones(256, 32)).sum())
          for kind in (nn.GELU(), nn.Softmax(-1), nn.LogSoftmax(-1))),
    ],
)  # fmt: skip
def test_a_prediction_equals_the_account(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    predicted = memory.predict(step, model, optimizer, device="cpu")
    account = measured(step, model, optimizer)
    assert predicted.peak_bytes == pytest.approx(account.peak_bytes, rel=0.001)


def test_lengths_that_are_unknown_are_the_longest() -> None:
    layer, inputs = nn.GRU(4, 5), torch.randn(6, 3, 4)

    def peak(lengths: Tensor) -> int:
        def step() -> None:
            packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths)
            assert len(nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0]) == 6

        return memory.predict(step, layer, device="cpu").peak_bytes

    longest = peak(torch.tensor([6, 6, 6]))
    assert sum(1 for _ in reachable(step=peak)) < 200, "pytest is no part of a program that asserts"
    assert peak(torch.tensor([6, 3, 1])) < longest == peak(torch.empty(3, dtype=torch.int64, device="meta"))


def test_masks_of_constants_and_draws_are_known_until_something_unknown_is_written_to_them() -> None:
    tokens = torch.ones(2, 8, dtype=torch.int64)

    def step() -> None:
        mask = torch.ones(2, 8)
        part = mask[:, :4]
        part.fill_(0)
        conditions = [bool((mask > 1).any()), bool(mask.all()), bool((mask == 0).any())]
        part.mul_(tokens[:, :4])
        drawn = [bool(torch.rand([]) < limit) for limit in (0, 1)]  # whether a layer is left out
        print([*conditions, bool((mask > 1).any()), *drawn], file=said)

    said = io.StringIO()
    memory.predict(step, device="cpu")
    assert said.getvalue().splitlines() == 2 * ["[False, False, True, True, False, True]"]
