"""The modules that replace those of torch.nn, by kernels: packed sequences and resets give what torch.nn gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import econmt_ops
from tests.ops.helpers import assert_close
from tests.ops.test_rnn import floats

SIZE, HIDDEN, BATCH, STEPS = 4, 6, 3, 5


def pair(kind: str, device: str, **options: Any) -> tuple[Any, Any]:
    """Returns a module by kernels and one of torch.nn in float64 on the CPU, with the same parameters."""
    torch.manual_seed(0)
    ours = getattr(econmt_ops, kind)(SIZE, HIDDEN, implementation="triton", device=device, **options)
    theirs = getattr(nn, kind)(SIZE, HIDDEN, **options)
    theirs.load_state_dict({name: weight.cpu() for name, weight in ours.state_dict().items()})
    return ours, theirs.double()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "bidirectional"])
def test_packed_sequences(kind: str, bidirectional: bool, device: str) -> None:
    ours, theirs = pair(kind, device, bidirectional=bidirectional)
    rows = [torch.randn(length, SIZE) for length in (2, 5, 3)]
    packed = pack_sequence(rows, enforce_sorted=False)
    for _ in range(2):  # the second call follows a plan
        assert_close(floats(ours(packed.to(device))), floats(theirs(packed.double())), 3e-3)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("lowered", [False, True], ids=["float32", "bfloat16"])
def test_states_and_gradients_end_at_resets(kind: str, lowered: bool, device: str) -> None:
    ours, theirs = pair(kind, device, batch_first=True)
    resets = torch.zeros(BATCH, STEPS, dtype=torch.bool)
    resets[0, 2] = resets[1, 1] = resets[1, 4] = True
    inputs = torch.randn(BATCH, STEPS, SIZE, device=device, requires_grad=True)
    state = torch.randn(1, BATCH, HIDDEN, device=device)
    hx = state if kind == "GRU" else (state, 0.5 * state)
    with torch.autocast(device, torch.bfloat16, enabled=lowered):
        outputs, _ = ours(inputs, hx, resets=resets)
    (gradient,) = torch.autograd.grad(outputs[0, 2:].float().square().sum(), inputs)
    assert gradient[0, :2].eq(0).all()
    assert gradient[0, 2:].ne(0).any(1).all()
    assert gradient[1:].eq(0).all()
    exact, start = inputs.detach().cpu().double(), state.detach().cpu().double()
    for row, begin, end in ((0, 0, 2), (0, 2, 5), (1, 0, 1), (1, 1, 4), (1, 4, 5), (2, 0, 5)):
        first = start[:, row : row + 1]
        hx = None if begin else (first if kind == "GRU" else (first, 0.5 * first))
        expected = theirs(exact[row : row + 1, begin:end], hx)[0]
        assert_close([outputs[row : row + 1, begin:end]], [expected], 3e-2 if lowered else 3e-3)
