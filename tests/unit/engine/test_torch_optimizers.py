"""Optimizers of torch.optim by their names, and what ours add to them: loss scale, rounding, sparse gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt.engine.optimizers import TorchOptimizer
from econmt_ops.optimizers import BackwardUpdates, LossScale

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "nadam": (torch.optim.NAdam, {"betas": (0.8, 0.95)}, {"betas": (0.8, 0.95)}),
    "radam": (torch.optim.RAdam, {"betas": (0.8, 0.95)}, {"betas": (0.8, 0.95)}),
    "adagrad": (torch.optim.Adagrad, {}, {}),
    "adadelta": (torch.optim.Adadelta, {"betas": (0.5, 0.9)}, {"rho": 0.9}),
    "rmsprop": (
        torch.optim.RMSprop,
        {"betas": (0.5, 0.95), "momentum": 0.9},
        {"alpha": 0.95, "momentum": 0.9},
    ),
    "adafactor": (torch.optim.Adafactor, {}, {}),
}
"""For each name torch's class, and the settings of ours and of torch's."""
NAMES = pytest.mark.parametrize("name", TorchOptimizer.names)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(2)
    shapes = ((70, 64), (7,), (1, 4))
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def give(run: list[nn.Parameter], seed: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for part in run:
        part.grad = (torch.randn(part.shape, generator=draw) * factor).to(part.dtype)


def everything(run: list[nn.Parameter], optimizer: TorchOptimizer) -> list[Tensor]:
    return [part.detach().clone() for part in (*run, *(x for p in run for x in optimizer.state[p].values()))]


@NAMES
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_torch(name: str, decay: float) -> None:
    """To the bit, the state included, before and after RAdam knows a variance, with a rate that changes."""
    kind, ours, theirs = KINDS[name]
    eps = (1e-6, 1e-3) if name == "adafactor" else 1e-6
    mine, yours = parameters(), parameters()
    optimizer = TorchOptimizer(mine, name=name, learning_rate=0.05, eps=1e-6, weight_decay=decay, **ours)
    other = kind(yours, lr=0.05, eps=eps, weight_decay=decay, **theirs)  # type: ignore[call-arg]
    for step in range(12):
        rate = 0.9 / (1 + step % 7)
        optimizer.set_learning_rate(rate)
        other.param_groups[0]["lr"] = rate
        give(mine, step)
        give(yours, step)
        optimizer.step()
        other.step()
    for one, two, before in zip(mine, yours, parameters(), strict=True):
        assert one.equal(two)
        assert not one.equal(before)
        for key, value in optimizer.state[one].items():
            assert value.equal(other.state[two][key]), key


@NAMES
def test_a_step_that_overflows_leaves_no_trace(name: str) -> None:
    """Neither the first one nor a later one; the others are those without a scale."""
    runs = parameters(), parameters()
    scaled, plain = (TorchOptimizer(run, name=name, learning_rate=0.5) for run in runs)
    scale = scaled.loss_scale = LossScale(torch.device("cpu"), 2.0**12)
    scaled.prepare()
    for number, overflows in enumerate((True, False, True, False)):
        give(runs[0], number, float(scale.scale))
        if overflows:
            before = everything(runs[0], scaled)
            runs[0][1].grad[3] = math.inf  # type: ignore[index]
            assert not scaled.clip_and_step("norm", 0.5).isfinite()
            assert all(map(torch.equal, before, everything(runs[0], scaled)))
        else:
            give(runs[1], number)
            scaled.clip_and_step("norm", 0.5)
            plain.clip_and_step("norm", 0.5)
        scaled.zero_grad()
    assert all(map(torch.equal, everything(runs[0], scaled), everything(runs[1], plain)))


@NAMES
def test_a_sparse_gradient_is_a_dense_one_with_zeros(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt_ops.optimizers.fused.BLOCK_BYTES", 4096)
    runs = parameters(), parameters()
    optimizers = [TorchOptimizer(run, name=name, learning_rate=0.05) for run in runs]
    for step in range(3):
        for run, optimizer, sparse in zip(runs, optimizers, (True, False), strict=True):
            give(run, step)
            rows = torch.tensor([3, 40 + step, 60])
            gradient = torch.zeros(70, 64).index_copy(0, rows, run[0].grad[rows])  # type: ignore[index]
            run[0].grad = gradient.to_sparse(1).coalesce() if sparse else gradient
            optimizer.step()
    for one, other in zip(*map(everything, runs, optimizers), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["nadam", "adafactor"])
def test_parameters_in_bfloat16_are_updated_in_float32_and_rounded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several parts, and during the backward pass."""
    monkeypatch.setattr("econmt_ops.optimizers.fused.BLOCK_BYTES", 16 * 64 * 4)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        (weight, *_) = parameters(dtype)
        optimizer = TorchOptimizer([weight], name=name, learning_rate=0.05)
        for _ in range(4):
            updates = BackwardUpdates(optimizer, "value", 1.0)
            with updates.running():
                weight.float().square().sum().backward()
            updates.finish()
        found.append((weight.detach().float(), optimizer.state[weight]))
    (exact, state), (rounded, narrow) = found
    torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=2e-2)
    kinds = [{key: (part.dtype, part.shape) for key, part in each.items()} for each in (state, narrow)]
    assert kinds[0] == kinds[1]
    assert float(narrow["step"]) == 4.0
