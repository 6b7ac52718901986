"""The compiled step functions give what the definitions give, are not compiled too often, and their absence is said."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch.utils._pytree import tree_leaves

import econmt_ops
from econmt_ops.backends import compiled, steps_for
from econmt_ops.backends.c.steps import CSteps
from tests.ops.cases import CASES, Sizes
from tests.ops.checking import VARIATIONS, Variation, check
from tests.ops.helpers import Make, assert_same_function


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lstm", "attentional-lstm-additive", "additive_attention"])
def test_values_and_gradients(name: str) -> None:
    """Two sizes each: the second must not need the first's."""
    for sizes in (Sizes(3, 5, 4, 6, 7, 9, 8), Sizes(4, 6, 5, 5, 10, 8, 7)):
        check(CASES[name], Variation(sizes), torch.float32, "cpu", ["reference", "compiled"])


@pytest.mark.slow
def test_losses() -> None:
    for rows in (3, 4):
        make = Make("cpu", torch.float32)
        arguments = {"hidden": make(rows, 5), "weight": make(11, 5), "bias": make(11)}
        options = {"targets": torch.arange(rows), "label_smoothing": 0.1, "ignore_index": 1}
        loss = functools.partial(econmt_ops.linear_cross_entropy, **options)
        by_name = [functools.partial(loss, implementation=name) for name in ("compiled", "reference")]
        assert_same_function(*by_name, arguments, torch.float32)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiled.is_available.cache_clear()
    try:
        with pytest.warns(
            RuntimeWarning, match=r"no C\+\+ compiler found, so 'compiled' runs as 'recompute'"
        ):
            check(CASES["lstm"], VARIATIONS["full"], torch.float32, "cpu", ["compiled"])
        assert type(steps_for(torch.empty(0), "compiled")) is CSteps
    finally:
        compiled.is_available.cache_clear()


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


@pytest.mark.thorough
@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("name", ["lstm", "attentional-lstm-additive"])
def test_many_shapes_and_steps_are_not_compiled_anew_too_often(name: str) -> None:
    case = CASES[name]
    sizes = (3, 4, 5, 8), (2, 7, 3, 8), (1, 5, 2, 8), (5, 3, 1, 6), (4, 1, 4, 6), (6, 9, 8, 10)
    for rows, steps, positions, hidden in sizes:
        tensors = case.tensors(
            Make("cpu", torch.float32), Sizes(rows, steps, positions, hidden, hidden, hidden, hidden)
        )
        lengths = torch.arange(rows) % (steps if name == "lstm" else positions) + 1
        for leaf in tree_leaves(tensors):
            if leaf is not None:
                leaf.requires_grad_()
        for stash in ("outputs", "gates"):
            outputs = case.op(**tensors, lengths=lengths, implementation="compiled", stash=stash)[0]
            outputs.square().sum().backward()
