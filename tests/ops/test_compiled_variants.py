"""Compiled steps are not made anew so often that torch.compile gives up."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import econmt_ops
from econmt_ops.backends import compiled

Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [(3, 4, 5, 8), (2, 7, 3, 8), (1, 5, 2, 8), (5, 3, 1, 6), (4, 1, 4, 6), (6, 9, 8, 10)]
"""Rows, steps, source positions, hidden."""


@pytest.fixture
def _traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps that torch.compile traces and hands to no compiler; it fails where it would give up."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(compiled, "is_available", lambda: True)
    compiled.compile_step.cache_clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    compiled.compile_step.cache_clear()
    torch.compiler.reset()


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float32, requires_grad=True)


def layer(inputs: int, hidden: int) -> econmt_ops.LSTMWeights:
    return econmt_ops.LSTMWeights(leaf(4 * hidden, inputs), leaf(4 * hidden, hidden), leaf(4 * hidden))


def run_lstm(shape: Shape, stash: str) -> None:
    batch, times, _, hidden = shape
    outputs, _ = econmt_ops.lstm(
        leaf(batch, times, hidden),
        (layer(hidden, hidden), layer(hidden, hidden)),
        lengths=torch.arange(batch) % times + 1,
        implementation="compiled",
        stash=stash,
    )
    outputs.square().sum().backward()


def run_attentional_lstm(shape: Shape, stash: str) -> None:
    batch, times, source, hidden = shape
    weights = econmt_ops.AttentionalLSTMWeights(
        (layer(2 * hidden, hidden), layer(hidden, hidden)),
        leaf(hidden, hidden),
        leaf(hidden),
        leaf(hidden, 2 * hidden),
        leaf(hidden),
    )
    outputs, _, _ = econmt_ops.attentional_lstm(
        leaf(batch, times, hidden),
        leaf(batch, source, hidden),
        leaf(batch, source, hidden),
        weights,
        lengths=torch.arange(batch) % source + 1,
        implementation="compiled",
        stash=stash,
    )
    outputs.square().sum().backward()


@pytest.mark.thorough
@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("run", [run_lstm, run_attentional_lstm])
def test_many_shapes_and_steps(run: object) -> None:
    assert callable(run)
    for shape in SHAPES:
        for stash in ("outputs", "gates"):
            run(shape, stash)
