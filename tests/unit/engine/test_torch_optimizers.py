"""Optimizers of econmt and of torch.optim by their names, and means of parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt.config.recipe import OptimizerSection as Optimizer
from econmt.engine.optimizers import TorchOptimizer, load_optimizer_tensors, make_optimizer, optimizer_tensors
from econmt.engine.parameters import begins
from econmt.errors import InputError
from econmt_ops.optimizers import BackwardUpdates, LossScale

EPS = {"eps": 1e-6}
FUSED = {**EPS, "fused": True}
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}, {"fused": True}),
    "momentum": (torch.optim.SGD, {"name": "sgd", "momentum": 0.9}, {"momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {}, FUSED),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95)}, {"betas": (0.8, 0.95), **FUSED}),
    "nadam": (torch.optim.NAdam, {"betas": (0.8, 0.95)}, {"betas": (0.8, 0.95), **EPS}),
    "radam": (torch.optim.RAdam, {"betas": (0.8, 0.95)}, {"betas": (0.8, 0.95), **EPS}),
    "adagrad": (torch.optim.Adagrad, {}, EPS),
    "adadelta": (torch.optim.Adadelta, {"betas": (0.5, 0.9)}, {"rho": 0.9, **EPS}),
    "rmsprop": (
        torch.optim.RMSprop,
        {"betas": (0.5, 0.95), "momentum": 0.9},
        {"alpha": 0.95, "momentum": 0.9, **EPS},
    ),
    "adafactor": (torch.optim.Adafactor, {}, {"eps": (1e-6, 1e-3)}),
}
"""For each name torch's class, and the settings of ours and of torch's."""
NAMES = pytest.mark.parametrize("name", TorchOptimizer.names)


def made_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(2)
    shapes = ((70, 64), (7,), (1, 4))
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def give(run: list[nn.Parameter], seed: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for part in run:
        part.grad = (torch.randn(part.shape, generator=draw) * factor).to(part.dtype)


def everything(run: list[nn.Parameter], optimizer: TorchOptimizer) -> list[Tensor]:
    return [part.detach().clone() for part in (*run, *(x for p in run for x in optimizer.state[p].values()))]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_torch(name: str, decay: float) -> None:
    """To the bit, the state included, before and after RAdam knows a variance, with a rate that changes.

    Each parameter lacks a gradient once; torch's SGD cannot do that.
    """
    kind, ours, theirs = KINDS[name]
    keys = {"name": name, "learning_rate": 0.05, "eps": 1e-6, "weight_decay": decay, **ours}
    mine, yours = made_parameters(), made_parameters()
    optimizer = make_optimizer(dict(zip("abc", mine, strict=True)), Optimizer.model_validate(keys))
    other = kind(yours, lr=0.05, weight_decay=decay, **theirs)  # type: ignore[call-arg]
    for step in range(12):
        rate = 0.9 / (1 + step % 7)
        optimizer.set_learning_rate(rate)
        other.param_groups[0]["lr"] = rate
        give(mine, step)
        give(yours, step)
        if step < 3 and kind is not torch.optim.SGD:
            mine[step].grad = yours[step].grad = None
        optimizer.step()
        other.step()
    for one, two, before in zip(mine, yours, made_parameters(), strict=True):
        assert one.equal(two)
        assert not one.equal(before)
        state = {key: value for key, value in other.state[two].items() if value is not None}
        found = optimizer.state.get(one, {})
        assert found.keys() == state.keys()
        assert all(found[key].equal(value) for key, value in state.items())


@NAMES
def test_a_step_that_overflows_leaves_no_trace(name: str) -> None:
    """Neither the first one nor a later one; the others are those without a scale."""
    runs = made_parameters(), made_parameters()
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
    runs = made_parameters(), made_parameters()
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
        (weight, *_) = made_parameters(dtype)
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


@pytest.mark.parametrize(
    "config",
    [
        Optimizer(name="adam"),
        Optimizer(name="adamw", weight_decay=0.1),
        Optimizer(name="sgd", momentum=0.9),
        Optimizer(name="sgd"),
        Optimizer(name="nadam"),
        Optimizer(name="adafactor"),
        Optimizer(name="adam8bit", weight_decay=0.1),
    ],
)
def test_state_comes_back_with_the_same_bits(config: Optimizer) -> None:
    torch.manual_seed(3)
    first = {"a": nn.Parameter(torch.randn(14, 300)), "b": nn.Parameter(torch.randn(5))}
    optimizer = make_optimizer(first, config)
    for _ in range(3):
        for parameter in first.values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    tensors = {key: value.clone() for key, value in optimizer_tensors(optimizer, first).items()}
    second = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in first.items()}
    resumed = make_optimizer(second, config)
    load_optimizer_tensors(resumed, second, tensors, "here")
    for name in first:
        first[name].grad = torch.randn_like(first[name])
        second[name].grad = first[name].grad.clone()
    optimizer.step()
    resumed.step()
    for name in first:
        assert torch.equal(first[name], second[name])
    # What was loaded is a copy: the step did not write into the tensors it came from.
    assert all(torch.equal(value, tensors[key]) for key, value in tensors.items())
    assert bool(tensors) == (config.name != "sgd" or config.momentum > 0)
    places = [value.data_ptr() for value in optimizer_tensors(resumed, second).values()]
    load_optimizer_tensors(resumed, second, tensors, "here")
    assert [value.data_ptr() for value in optimizer_tensors(resumed, second).values()] == places, "for graphs"


def test_momentum_may_come_to_a_state_without_it() -> None:
    """A mean of the parameters lies there already."""
    part = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer({"a": part}, Optimizer(name="sgd", learning_rate=0.1, momentum=0.9))
    optimizer.state[part] = {"average": torch.full((3,), 7.0)}
    part.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(part.detach(), torch.full((3,), 0.9))
    assert optimizer.state[part].keys() == {"momentum_buffer", "average"}
    assert torch.equal(optimizer.state[part]["average"], torch.full((3,), 7.0))


def test_state_of_another_model_is_refused_by_name() -> None:
    for name, shape, message in (
        ("z", 3, r"optimizer state of 'z', but the model has no such parameter"),
        ("a", 4, r"optimizer state exp_avg/a has shape \(4,\), but the parameter needs \(3,\)"),
    ):
        parameters = {"a": nn.Parameter(torch.zeros(3))}
        optimizer = make_optimizer(parameters, Optimizer())
        with pytest.raises(InputError, match=f"file: {message}"):
            load_optimizer_tensors(optimizer, parameters, {f"exp_avg/{name}": torch.zeros(shape)}, "file")


def test_the_newest_is_compared_with_the_best_of_those_before_the_interval() -> None:
    for perplexities in ([], [5.0], [5.0, 5.0]):
        assert not begins(perplexities, 0)
    assert begins([5.0, 6.0], 0)
    for perplexities in ([4.0, 5.0], [5.0, 4.0, 4.5], [3.0, 9.0, 8.0, 2.0]):
        assert not begins(perplexities, 1)
    for perplexities in ([4.0, 5.0, 4.5], [3.0, 9.0, 8.0, 4.0]):
        assert begins(perplexities, 1)
