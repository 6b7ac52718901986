"""The compiled step functions give what the eager ones give, and their absence is said."""

from __future__ import annotations

import shutil

import pytest
import torch

import econmt_ops
from econmt_ops.backends import compiled, steps_for
from econmt_ops.backends.c.steps import CSteps
from tests.ops.helpers import Make, assert_close, values_and_gradients
from tests.ops.test_recompute import attentional_arguments, lstm_arguments


def both(op: str, arguments: dict[str, object], **options: object) -> None:
    function = getattr(econmt_ops, op)
    results = [
        values_and_gradients(
            lambda implementation=implementation, **tensors: function(
                **tensors, **options, implementation=implementation
            ),
            arguments,
        )
        for implementation in ("recompute", "compiled")
    ]
    assert_close(results[1][0], results[0][0], 1e-5)
    assert_close(results[1][1], results[0][1], 1e-5)


def test_compiled_equals_recompute() -> None:
    """Two sizes each: the second must not need the first's."""
    for batch, length, size in ((3, 5, 7), (4, 6, 10)):
        make = Make("cpu", torch.float32)
        lengths = torch.full((batch,), 3)
        both("attentional_lstm", attentional_arguments(make, 2, batch, length, size), lengths=lengths)
        both("lstm", lstm_arguments(make, 2, batch, length, size), lengths=lengths)
        loss = {"hidden": make(batch, 5), "weight": make(11, 5), "bias": make(11)}
        targets = torch.arange(batch)
        both("linear_cross_entropy", loss, targets=targets, label_smoothing=0.1, ignore_index=1)
        attention = {
            "query": make(batch, 2, size),
            "keys": make(batch, 4, size),
            "values": make(batch, 4, 3),
            "score_weight": make(size),
        }
        both("additive_attention", attention, lengths=lengths)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiled.is_available.cache_clear()
    try:
        with pytest.warns(
            RuntimeWarning, match=r"no C\+\+ compiler found, so 'compiled' runs as 'recompute'"
        ):
            both("lstm", lstm_arguments(Make("cpu", torch.float32)))
        assert type(steps_for(torch.empty(0), "compiled")) is CSteps
    finally:
        compiled.is_available.cache_clear()
