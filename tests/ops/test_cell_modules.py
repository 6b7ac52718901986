"""The modules of the cells that torch.nn does not have; tests/ops/test_rnn.py has those of LSTM and GRU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import econmt_ops
from tests.ops.helpers import assert_close

MODULES = [
    econmt_ops.LayerNormLSTM,
    econmt_ops.SRU,
    econmt_ops.SSRU,
    econmt_ops.QRNN,
    econmt_ops.GILRLSTM,
]
each_module = pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)


@each_module
def test_both_directions_are_two_stacks_side_by_side(kind: Any) -> None:
    torch.manual_seed(0)
    both = kind(3, 4, 2, bidirectional=True)
    inputs, lengths = torch.randn(2, 5, 3), torch.tensor([5, 2])
    outputs, state = both(inputs, lengths=lengths)
    below = [
        both.op(inputs, (both.layer_weights(0, way),), lengths=lengths, reverse=way) for way in (False, True)
    ]
    read = torch.cat([half for half, _ in below], 2)
    above = [
        both.op(read, (both.layer_weights(1, way),), lengths=lengths, reverse=way) for way in (False, True)
    ]
    assert_close([outputs], [torch.cat([half for half, _ in above], 2)], 0.0)
    for actual, (_, (expected,)) in zip(state, [*below, *above], strict=True):
        assert_close(actual, expected, 0.0)


@pytest.mark.parametrize("kind", [*MODULES, econmt_ops.LSTM, econmt_ops.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_only_while_training_and_by_seed(kind: Any, bidirectional: bool, device: str) -> None:
    torch.manual_seed(0)
    module = kind(3, 4, 2, dropout=0.5, bidirectional=bidirectional, device=device)
    inputs = torch.randn(2, 5, 3, device=device)
    kept, again, other = (module(inputs, dropout_seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(kept, again)
    assert not torch.equal(kept, other)
    drawn = []
    for seed in (9, 9, 10):
        torch.manual_seed(seed)
        drawn.append(module(inputs)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(module(inputs)[0], module(inputs)[0])
    module.eval()
    module.dropout = 0.0
    assert torch.equal(module(inputs)[0], module.train()(inputs)[0])
    module.dropout = 0.5
    assert torch.equal(module.eval()(inputs)[0], module(inputs, dropout_seed=1)[0])


@each_module
def test_gains_begin_at_one_and_the_sizes_are_shown(kind: Any) -> None:
    module = kind(3, 4, bidirectional=True)
    gains = [weight for name, weight in module.named_parameters() if "_gain_" in name]
    assert all(bool((gain == 1.0).all()) for gain in gains)
    assert bool(gains) == (kind is econmt_ops.LayerNormLSTM)
    assert repr(module) == f"{kind.__name__}(3, 4, num_layers=1, bidirectional=True)"


@each_module
def test_sizes_and_states_that_do_not_fit_are_told(kind: Any) -> None:
    name = kind.__name__
    with pytest.raises(ValueError, match=f"{name}: hidden_size must be at least 1, got 0"):
        kind(3, 0)
    with pytest.raises(ValueError, match=f"{name}: num_layers must be at least 1, got 0"):
        kind(3, 4, 0)
    both = kind(3, 4, 2, bidirectional=True)
    size = r"inputs must be \(B, T, input_size\) with input_size=3, got \(2, 5, 4\)"
    with pytest.raises(ValueError, match=f"{name}: {size}"):
        both(torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match=f"{name}: inputs must be a tensor, got None"):
        both(None)
    _, state = both(torch.randn(2, 5, 3))
    for wrong in (state[:3], (*state, state[0])):
        message = f"state must have 4 entries, one per layer and direction, got {len(wrong)}"
        with pytest.raises(ValueError, match=message):
            both(torch.randn(2, 5, 3), wrong)
