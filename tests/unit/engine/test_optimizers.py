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


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"weight_decay": 0.01}),
        (torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_torch(kind: type[torch.optim.Optimizer], keys: dict[str, Any]) -> None:
    """To the bit, with a parameter that has no gradient at first (torch's SGD cannot do that); so is the state."""
    start = [torch.randn(5, 3), torch.randn(7), torch.randn(2, 2)]
    ours, theirs = ([nn.Parameter(part.clone()) for part in start] for _ in range(2))
    config = Optimizer.model_validate({"name": kind.__name__.lower(), "learning_rate": 0.05, **keys})
    mine = make_optimizer(dict(zip("abc", ours, strict=True)), config)
    yours = kind(theirs, lr=0.05, fused=True, **keys)  # type: ignore[call-arg]
    for step in range(4):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            gradient = (
                None if number == step and keys and kind is not torch.optim.SGD else torch.randn_like(pair[0])
            )
            for parameter in pair:
                parameter.grad = None if gradient is None else gradient.clone()
        mine.step()
        yours.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        state = {name: part for name, part in yours.state[other].items() if part is not None}
        assert mine.state.get(one, {}).keys() == state.keys()
        assert all(torch.equal(mine.state[one][name], value) for name, value in state.items())


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
    for name, shape, message in (
        ("z", 3, r"optimizer state of 'z', but the model has no such parameter"),
        ("a", 4, r"optimizer state exp_avg/a has shape \(4,\), but the parameter needs \(3,\)"),
    ):
        parameters = {"a": nn.Parameter(torch.zeros(3))}
        optimizer = make_optimizer(parameters, Optimizer())
        with pytest.raises(InputError, match=f"file: {message}"):
            load_optimizer_tensors(optimizer, parameters, {f"exp_avg/{name}": torch.zeros(shape)}, "file")
