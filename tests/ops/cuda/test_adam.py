"""The kernel of Adam on the CPU, see `host`, beside torch's Adam in float64."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from econmt_ops.backends.cuda import adam
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.optimizers.loss_scale import LossScale
from tests.ops.cuda.host import HostKernel
from tests.ops.test_optimizer import rows_only

MOST, THREADS, TILE = 4, 64, 512
"""Smaller than on a GPU, so that few threads have to be played."""

SHAPES = [(3,), (TILE,), (0, 7), (TILE + 4, 2), (1,), ()]
"""Less than a tile, a whole one, nothing, several with an odd end, and scalars."""


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    macros = {"MOST": MOST, "THREADS": THREADS, "TILE": TILE}
    of_width = ({**macros, "NARROW": narrow} for narrow in (0, 1))
    kernels = [HostKernel("adam", "AdamArguments", each, THREADS, 1, 0) for each in of_width]
    monkeypatch.setattr(adam, "_MOST", MOST)
    monkeypatch.setattr(adam, "_TILE", TILE)
    monkeypatch.setattr(adam, "is_available", lambda _device: True)
    monkeypatch.setattr(adam, "_kernel", lambda _device, narrow: kernels[narrow])


def draws(count: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(7)
    return [[torch.randn(shape, generator=draw) for shape in shapes] for _ in range(count)]


@pytest.mark.parametrize(
    "keys", [{"name": "adam"}, {"name": "adam", "weight_decay": 0.1}, {"name": "adamw"}], ids=str
)
@pytest.mark.parametrize("kind", ["none", "value", "norm"])
def test_updates_are_those_of_torch(keys: dict[str, Any], kind: str) -> None:
    decay = keys.setdefault("weight_decay", 0.01)
    start, *gradients = draws(4)
    ours = [nn.Parameter(part.clone()) for part in start]
    theirs = [nn.Parameter(part.double()) for part in start]
    rate = torch.tensor(0.05)
    optimizer = FusedOptimizer(ours, learning_rate=rate, betas=(0.8, 0.95), eps=1e-4, **keys)
    make = torch.optim.Adam if keys["name"] == "adam" else torch.optim.AdamW
    other = make(theirs, lr=0.05, betas=(0.8, 0.95), eps=1e-4, weight_decay=decay)
    for number, step in enumerate(gradients):
        for mine, their, gradient in zip(ours, theirs, step, strict=True):
            mine.grad, their.grad = gradient.clone(), gradient.double()
        rate.fill_(0.05 / (1 + number))
        other.param_groups[0]["lr"] = 0.05 / (1 + number)
        expected = torch.nn.utils.get_total_norm([gradient.double() for gradient in step])
        if kind == "value":
            torch.nn.utils.clip_grad_value_(theirs, 0.5)
        elif kind == "norm":
            torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        norm = optimizer.clip_and_step(kind, 0.5)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0.0)
        other.step()
        for mine, their, gradient in zip(ours, theirs, step, strict=True):
            torch.testing.assert_close(mine.double(), their, rtol=1e-5, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state[mine][name].double()
                torch.testing.assert_close(state, other.state[their][name], rtol=1e-5, atol=1e-7)
            assert mine.grad is not None
            assert mine.grad.equal(gradient)


def test_clipping_and_step_apart_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(wraps=adam.serves)
    monkeypatch.setattr(adam, "serves", asked)
    start, gradients = ([part.bfloat16() if part.dim() == 2 else part for part in each] for each in draws(2))
    runs = [[nn.Parameter(part.clone()) for part in start] for _ in range(2)]
    optimizers = [FusedOptimizer(run, name="adam", learning_rate=0.05) for run in runs]
    for run in runs:
        for parameter, gradient in zip(run, gradients, strict=True):
            parameter.grad = gradient.clone()
    optimizers[0].clip_and_step("value", 0.5)
    optimizers[1].clip("value", 0.5)
    optimizers[1].step()
    assert all(one.equal(other) for one, other in zip(*runs, strict=True))
    assert asked.call_count == 2 * len(start), "once for each update"


@pytest.mark.parametrize("kind", ["none", "value", "norm"])
def test_a_scaled_step_is_one_without_scale_or_none(kind: str) -> None:
    start, gradients = draws(2)
    runs = [[nn.Parameter(part.clone()) for part in start] for _ in range(2)]
    scaled, plain = optimizers = [FusedOptimizer(run, name="adam", learning_rate=0.05) for run in runs]
    scaled.loss_scale = LossScale(torch.device("cpu"), 1024.0)
    for factor in (math.inf, 512.0):
        for parameter, gradient in zip(runs[0], gradients, strict=True):
            parameter.grad = gradient * factor
        scaled.clip_and_step(kind, 0.5)
        assert all(map(torch.equal, runs[0], start)) is (factor == math.inf)
    for parameter, gradient in zip(runs[1], gradients, strict=True):
        parameter.grad = gradient.clone()
    plain.clip_and_step(kind, 0.5)
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0.0)
        assert optimizers[0].state[one]["step"] == optimizers[1].state[other]["step"] == 1.0


def test_more_tensors_than_a_launch_takes_at_addresses_that_are_not_aligned() -> None:
    shapes = [(TILE + number % 3,) for number in range(2 * MOST + 1)]
    start, gradients = draws(2, shapes)
    memory = torch.zeros(sum(part.numel() for part in start))
    views, begin = [], 0
    for part in start:
        views.append(memory[begin : begin + part.numel()].copy_(part))
        begin += part.numel()
    assert {view.data_ptr() % 16 for view in views} == {0, 4, 8, 12}
    parameters = [nn.Parameter(view) for view in views]
    optimizer = FusedOptimizer(parameters, name="adam", learning_rate=0.5)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.clip_and_step("none", 0.0)
    for parameter, before, gradient in zip(parameters, start, gradients, strict=True):
        torch.testing.assert_close(parameter, before - 0.5 * gradient / (gradient.abs() + 1e-8))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_handed_on(wrong: float) -> None:
    parameter = nn.Parameter(torch.zeros(5))
    parameter.grad = torch.tensor([1.0, wrong, 1.0, 1.0, 1.0])
    optimizer = FusedOptimizer([parameter], name="adam", learning_rate=0.5)
    norm = optimizer.clip_and_step("value", 2.0)
    assert not math.isfinite(float(norm))
    assert parameter.isfinite().tolist() == [True, math.isinf(wrong), True, True, True]


def test_other_parameters_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another type; rows of a sparse gradient are updated in blocks."""
    double = nn.Parameter(torch.ones(4, dtype=torch.float64))
    sparse = nn.Parameter(torch.ones(4, 3))
    double.grad = torch.ones(4, dtype=torch.float64)
    sparse.grad = rows_only(torch.ones(4, 3), torch.tensor([1]))
    optimizer = FusedOptimizer([double], name="adam", learning_rate=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(adam, "run", lambda *_arguments, **_options: pytest.fail("the kernel ran"))
        optimizer.clip_and_step("value", 2.0)
    torch.testing.assert_close(double, torch.full_like(double, 0.5))
    optimizer = FusedOptimizer([sparse], name="adam", learning_rate=0.5)
    optimizer.clip_and_step("value", 2.0)
    torch.testing.assert_close(sparse[:, 0], torch.tensor([1.0, 0.5, 1.0, 1.0]))


@pytest.mark.parametrize("kind", ["none", "value", "norm"])
def test_parameters_in_bfloat16_are_rounded_as_defined(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Beside others in float32; a float32 update that differs in its last bit is rounded to a neighbour at most."""
    start, *gradients = draws(4)
    types = [torch.bfloat16 if part.dim() == 2 else torch.float32 for part in start]
    runs = []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(adam, "is_available", lambda _device: False)
        run = [nn.Parameter(part.to(dtype)) for part, dtype in zip(start, types, strict=True)]
        optimizer = FusedOptimizer(run, name="adam", learning_rate=0.05, weight_decay=0.1, rounding_seed=3)
        norms = []
        for step in gradients:
            for parameter, gradient in zip(run, step, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            norms.append(float(optimizer.clip_and_step(kind, 0.5)))
        runs.append((run, norms))
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5)
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=1e-6)
        if one.numel():
            assert (one == other).float().mean() > 0.98
