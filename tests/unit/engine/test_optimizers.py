from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from econmt.config.recipe import OptimizerSection as Optimizer
from econmt.engine.optimizers import (
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
)
from econmt.errors import InputError

GRADIENTS = [0.5, -1.0, 0.25, 2.0]


def run(config: Optimizer, start: float = 1.5, rates: list[float] | None = None) -> float:
    parameter = nn.Parameter(torch.tensor([start]))
    optimizer = make_optimizer({"weight": parameter}, config)
    for step, gradient in enumerate(GRADIENTS):
        if rates is not None:
            optimizer.set_learning_rate(rates[step])
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
    return parameter.item()


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        {"name": "adam", "weight_decay": 0.01},
        {"name": "adamw", "betas": [0.8, 0.95], "weight_decay": 0.1},
    ],
    ids=str,
)
def test_steps_are_those_of_torch(keys: dict[str, object]) -> None:
    """To the bit, with a parameter that has no gradient at first (torch's SGD cannot do that); so is the state."""
    config = Optimizer.model_validate({"learning_rate": 0.05, **keys})
    start = [torch.randn(5, 3), torch.randn(7), torch.randn(2, 2)]
    runs = []
    for kind in ("ours", "theirs"):
        parameters = [nn.Parameter(part.clone()) for part in start]
        if kind == "ours":
            optimizer: Any = make_optimizer(dict(zip("abc", parameters, strict=True)), config)
        else:
            momentous = config.name == "sgd"
            betas = {} if momentous else {"betas": config.betas, "eps": config.eps}
            momentum = {"momentum": config.momentum} if momentous else {}
            algorithm = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
                config.name
            ]
            optimizer = algorithm(
                parameters, lr=0.05, weight_decay=config.weight_decay, fused=True, **betas, **momentum
            )
        generator = torch.Generator().manual_seed(1)
        for step in range(4):
            optimizer.zero_grad()
            for number, parameter in enumerate(parameters):
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if number == step and config.name != "sgd" else gradient
            optimizer.step()
        state = [
            {name: part for name, part in optimizer.state.get(parameter, {}).items() if part is not None}
            for parameter in parameters
        ]
        runs.append((parameters, state))
    (ours, our_state), (theirs, their_state) = runs
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    for mine, yours in zip(our_state, their_state, strict=True):
        assert mine.keys() == yours.keys()
        assert all(torch.equal(mine[name], yours[name]) for name in mine)


def test_the_rate_of_each_update_can_be_set() -> None:
    rates = [0.1, 0.2, 0.0, 1.0]
    expected = 1.5 - sum(rate * gradient for rate, gradient in zip(rates, GRADIENTS, strict=True))
    assert run(Optimizer(name="sgd", learning_rate=7.0), rates=rates) == pytest.approx(expected, rel=1e-5)


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
    parameters = {"a": nn.Parameter(torch.zeros(3))}
    optimizer = make_optimizer(parameters, Optimizer())
    with pytest.raises(
        InputError, match=r"file: optimizer state of 'z', but the model has no such parameter"
    ):
        load_optimizer_tensors(optimizer, parameters, {"exp_avg/z": torch.zeros(3)}, "file")
    with pytest.raises(
        InputError, match=r"file: optimizer state exp_avg/a has shape \(4,\), but the parameter needs \(3,\)"
    ):
        load_optimizer_tensors(optimizer, parameters, {"exp_avg/a": torch.zeros(4)}, "file")
