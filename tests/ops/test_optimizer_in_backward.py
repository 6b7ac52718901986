"""Updates in the backward pass are those after it, to the bit, and free each gradient."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt_ops.optimizers import LossScale
from econmt_ops.optimizers import in_backward as optimizer_in_backward
from econmt_ops.optimizers.eight_bit import EightBitOptimizer
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.optimizers.in_backward import BackwardUpdates
from tests.ops.test_optimizer import DEVICES

KINDS: list[tuple[type[FusedOptimizer], dict[str, Any]]] = [
    (FusedOptimizer, {"name": "adam", "weight_decay": 0.1}),
    (FusedOptimizer, {"name": "nag", "momentum": 0.9}),
    (EightBitOptimizer, {"name": "adamw8bit", "weight_decay": 0.1}),
]


def parameters(device: str) -> dict[str, nn.Parameter]:
    """A table that is used twice, matrices, a vector, and one that the loss does not need."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"table": (40, 128), "matrix": (128, 128), "bias": (128,), "unused": (3,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=draw).to(device) / 8)
        for name, shape in shapes.items()
    }


def loss_of(its: dict[str, nn.Parameter], ids: Tensor, sparse: bool) -> Tensor:
    read = nn.functional.embedding(ids, its["table"], sparse=sparse)
    hidden = torch.tanh(read @ its["matrix"] + its["bias"])
    scores = hidden @ (its["matrix"] if sparse else its["table"].t())
    return torch.nn.functional.cross_entropy(scores, ids) * 5.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["none", "value"])
@pytest.mark.parametrize(("make", "keys"), KINDS, ids=lambda part: str(part))
@pytest.mark.parametrize("together", [1, 1 << 30])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.sampled(12)
def test_results_are_those_of_the_step_after_it(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    kind: str,
    make: type[FusedOptimizer],
    keys: dict[str, Any],
    together: int,
    sparse: bool,
) -> None:
    """One by one or all at once; the table's gradient has the sum of both of its uses, or rows."""
    if sparse and device != "cpu":
        pytest.skip("rows are gradients of a CPU")
    monkeypatch.setattr(optimizer_in_backward, "GROUP_BYTES", together)
    ids = torch.tensor([3, 1, 3, 7], device=device)
    runs = [parameters(device) for _ in range(2)]
    rate = [torch.tensor(0.01, device=device) for _ in runs]
    optimizers = [
        make(run.values(), learning_rate=each, **keys) for run, each in zip(runs, rate, strict=True)
    ]
    updates = BackwardUpdates(optimizers[0], kind, 0.01)
    for _ in range(3):
        with updates.running():
            loss_of(runs[0], ids, sparse).backward()
        assert updates.started == (together == 1)
        norm = updates.finish()
        assert not updates.started
        assert all(parameter.grad is None for parameter in runs[0].values())
        optimizers[1].zero_grad()
        loss_of(runs[1], ids, sparse).backward()
        assert norm.equal(optimizers[1].clip_and_step(kind, 0.01))
    for name, one in runs[0].items():
        other = runs[1][name]
        assert one.equal(other)
        assert (name == "unused") == (one not in optimizers[0].state)
        for quantity, value in optimizers[0].state.get(one, {}).items():
            assert value.equal(optimizers[1].state[other][quantity])


@pytest.mark.parametrize(("together", "expected"), [(1, [1, 1, 1, 1]), (2 * 64 * 64 * 4, [1, 2, 1, 2])])
def test_gradients_are_freed_as_soon_as_they_are_large_enough_together(
    monkeypatch: pytest.MonkeyPatch, together: int, expected: list[int]
) -> None:
    monkeypatch.setattr(optimizer_in_backward, "GROUP_BYTES", together)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    weights = [layer.weight for layer in layers]
    optimizer = FusedOptimizer(weights, name="sgd", learning_rate=0.1)
    updates, alive = BackwardUpdates(optimizer, "none", 0.0), []
    updates.watch = lambda _: alive.append(sum(weight.grad is not None for weight in weights))
    hidden = torch.ones(2, 64)
    for layer in layers:
        hidden = layer(hidden)
    with updates.running():
        hidden.sum().backward()
    updates.finish()
    assert alive == expected


def ones() -> tuple[nn.Parameter, BackwardUpdates]:
    """A parameter of three ones, and updates of it in the backward pass."""
    weight = nn.Parameter(torch.ones(3))
    return weight, BackwardUpdates(FusedOptimizer([weight], name="sgd", learning_rate=0.5), "none", 0.0)


def test_gradients_may_be_dropped_without_an_update_and_outside_of_a_context_are_left_alone() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedOptimizer(weights, name="sgd", learning_rate=0.5)
    updates = BackwardUpdates(optimizer, "none", 0.0)
    with updates.discarding():
        (weights[0].sum() + 2.0 * weights[1].sum()).backward()
    assert [weight.grad for weight in weights] == [None, None]
    assert all(weight.tolist() == [1.0, 1.0, 1.0] for weight in weights)
    weights[0].sum().backward()
    assert weights[0].grad is not None
    assert weights[0].tolist() == [1.0, 1.0, 1.0]


def test_what_needs_all_gradients_is_refused() -> None:
    optimizer = FusedOptimizer([nn.Parameter(torch.ones(3))], name="sgd", learning_rate=0.5)
    with pytest.raises(ValueError, match="the norm is known after the last gradient"):
        BackwardUpdates(optimizer, "norm", 1.0)
    optimizer.loss_scale = LossScale(torch.device("cpu"))
    with pytest.raises(ValueError, match="loss scale"), BackwardUpdates(optimizer, "none", 1.0).running():
        pass


@pytest.mark.parametrize("together", [1, 1 << 30])
def test_a_second_gradient_of_a_parameter_is_refused(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """It would be updated twice, the second time by both gradients if the first one was not freed yet."""
    monkeypatch.setattr(optimizer_in_backward, "GROUP_BYTES", together)
    weight, updates = ones()
    with updates.running():
        weight.sum().backward()
        with pytest.raises(RuntimeError, match=r"shape \(3,\) got a second gradient before finish"):
            weight.sum().backward()
    updates.finish()
    assert weight.tolist() == ([0.5] * 3 if together == 1 else [0.0] * 3)


@pytest.mark.parametrize("together", [1, 1 << 30])
def test_a_pass_that_fails_is_forgotten(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(optimizer_in_backward, "GROUP_BYTES", together)
    weight, updates = ones()
    with contextlib.suppress(ZeroDivisionError), updates.running():
        weight.sum().backward()
        raise ZeroDivisionError
    weight.grad = None
    with updates.running():
        weight.sum().backward()
    assert float(updates.finish()) == pytest.approx(3.0**0.5)
    assert weight.tolist() == [1.0 - 0.5 * (1 + (together == 1))] * 3
