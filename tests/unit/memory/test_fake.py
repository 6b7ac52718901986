"""What stands in for operators on fake tensors has the sizes of the real thing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import econmt_ops
from econmt_memory.estimate.fake import ON_GPU, REPLACEMENTS, fake_tensors, onednn_workspace
from econmt_memory.measure.tracker import Tracker


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 16), (10, 4, 8, 16), (9, 3, 72, 64), (3, 5, 520, 512), (5, 2, 16, 256), (4, 6, 300, 48)],
)
def test_onednn_keeps_what_is_predicted(sizes: tuple[int, int, int, int]) -> None:
    steps, batch, inputs, hidden = sizes
    weights = [torch.zeros(4 * hidden, *shape) for shape in ([inputs], [hidden], [], [])]
    values, state = torch.zeros(steps, batch, inputs), torch.zeros(1, batch, hidden)
    settings = (False, [], 2, hidden, 1, True, False, False, True)
    result = torch.ops.aten.mkldnn_rnn_layer(values, *weights, state, state, *settings)
    # Rows may be padded otherwise on a CPU with other vectors.
    assert onednn_workspace(*sizes) == pytest.approx(result[3].numel(), rel=0.02, abs=7 * 4096)


def test_values_are_taken_at_their_worst() -> None:
    with FakeTensorMode(), Tracker(torch.device("cpu"), replacements=REPLACEMENTS):
        seed = int(torch.randint(2**62, ()))
        assert (torch.zeros(3, 4) != 0).nonzero().shape == (12, 2)
        mask = torch.ones(5, dtype=torch.bool)
        assert torch.zeros(5, 2)[mask.nonzero().squeeze(1)].shape == (5, 2)
    assert isinstance(seed, int)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_cudnn_lstm_has_the_results_and_gradients_of_an_lstm(bidirectional: bool, batch_first: bool) -> None:
    lstm = torch.nn.LSTM(6, 5, batch_first=batch_first, bidirectional=bidirectional)
    inputs = torch.zeros(7, 3, 6, requires_grad=True)
    state = torch.zeros(2 if bidirectional else 1, 3 if not batch_first else 7, 5)
    real, (real_h, real_c) = lstm(inputs, (state, state))
    weights = [parameter.shape for parameter in lstm.parameters()]
    tracker = Tracker(torch.device("cpu"), replacements=ON_GPU)
    with fake_tensors("cuda"):
        inputs, state = torch.zeros(7, 3, 6, requires_grad=True), torch.zeros(state.shape)
        parameters = [torch.zeros(shape, requires_grad=True) for shape in weights]
        with tracker.recording():
            settings = (True, 1, 0.0, True, bidirectional, batch_first)
            outputs, h, c = torch.lstm(inputs, (state, state), parameters, *settings)
            torch.autograd.backward(outputs.sum())
        assert (outputs.shape, outputs.stride()) == (real.shape, real.stride())
        assert (h.shape, c.shape) == (real_h.shape, real_c.shape)
        assert inputs.grad.shape == inputs.shape
        assert [None if p.grad is None else p.grad.shape for p in parameters] == weights
    kept = {s.shape for s in tracker.alive(len(tracker.changes)) if s.kept_by is not None}
    directions = 2 if bidirectional else 1
    reserve = -(-21 * directions * 5 * 5 * 4 // 64) * 64 + 256
    assert (reserve,) not in kept  # the reserve is gone after the backward pass
    assert {c.storage.operator for c in tracker.changes} >= {"aten._cudnn_rnn", "aten._cudnn_rnn_backward"}
    assert not [c for c in tracker.changes if c.storage.operator.endswith("aten.new_empty")]
    sizes = [change.size for change in tracker.changes]
    assert reserve in sizes
    steps, batch = (3, 7) if batch_first else (7, 3)
    assert tracker.flops.total() == 3 * 2 * directions * steps * batch * (6 + 5) * 20


def test_tensors_are_compared_without_making_them() -> None:
    """By itself PyTorch would make both, filled with zeros: as much memory as the step that is only predicted."""
    with fake_tensors("cpu"), Tracker(torch.device("cpu"), replacements=REPLACEMENTS):
        large = torch.empty(1 << 50)
        assert large.is_set_to(large.detach())
        assert not large.is_set_to(torch.empty(1 << 50))
        assert not large.is_set_to(large[1:])
        assert not large.is_set_to(large.view(2, -1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_scan_costs_what_it_declares(device: str) -> None:
    """Whatever its length, none of its steps is followed: two operations a value forward, four backward."""
    tracker = Tracker(torch.device("cpu"), replacements=REPLACEMENTS)
    with fake_tensors(device), tracker:
        given = [torch.zeros(2, 1000, 8, requires_grad=True) for _ in range(2)]
        lengths = torch.zeros(2, dtype=torch.int64)
        outputs = econmt_ops.linear_recurrence(*given, lengths=lengths)
        torch.autograd.grad(outputs.sum(), given)
    assert dict(tracker.flops) == {torch.float32: 6 * outputs.numel()}
