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


@pytest.mark.parametrize(
    "op",
    [
        pytest.param("lstm", marks=pytest.mark.thorough),
        pytest.param("attentional_lstm", marks=pytest.mark.thorough),
        pytest.param("linear_cross_entropy", marks=pytest.mark.slow),
        pytest.param("additive_attention", marks=pytest.mark.thorough),
    ],
)
def test_compiled_equals_recompute(op: str) -> None:
    """Two sizes each: the second must not need the first's."""
    for batch, length, size in ((3, 5, 7), (4, 6, 10)):
        make = Make("cpu", torch.float32)
        options: dict[str, object] = {"lengths": torch.full((batch,), 3)}
        if op == "lstm":
            arguments = lstm_arguments(make, 2, batch, length, size)
        elif op == "attentional_lstm":
            arguments = attentional_arguments(make, 2, batch, length, size)
        elif op == "additive_attention":
            tensors = {"query": 2, "keys": 4, "values": 4}
            arguments = {name: make(batch, positions, size) for name, positions in tensors.items()}
            arguments["score_weight"] = make(size)
        else:
            arguments = {"hidden": make(batch, 5), "weight": make(11, 5), "bias": make(11)}
            options = {"targets": torch.arange(batch), "label_smoothing": 0.1, "ignore_index": 1}
        both(op, arguments, **options)


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
