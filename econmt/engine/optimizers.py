"""The optimizers, and their state as plain named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.errors import InputError
from econmt_ops.optimizer import FusedOptimizer
from econmt_ops.optimizer_8bit import EightBitOptimizer
from econmt_ops.optimizer_rules import PlainOptimizer


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: recipe.OptimizerSection,
    owned: Iterable[nn.Parameter] | None = None,
) -> FusedOptimizer:
    """The optimizer of a recipe over named parameters, all of them on one device.

    Its kernels give the same bits in every run. It updates those that are ``owned``; None: all.
    """
    kinds = (FusedOptimizer, PlainOptimizer, EightBitOptimizer)
    kind = next(kind for kind in kinds if config.name in kind.names)
    return kind(parameters.values(), **config.model_dump(), owned=owned)


def optimizer_tensors(optimizer: FusedOptimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as tensors named ``<quantity>/<parameter>``, for example ``exp_avg/encoder.weight``."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for quantity, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{quantity}/{name}"] = value
    return tensors


def load_optimizer_tensors(
    optimizer: FusedOptimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    where: str,
) -> None:
    """Puts back what :func:`optimizer_tensors` gave, of parameters that the optimizer updates.

    What is there already keeps its place in memory.

    Raises:
        InputError: naming ``where`` and the tensor, if one belongs to no parameter or has another shape.
    """
    before = dict(optimizer.state)
    optimizer.state.clear()
    for key, value in tensors.items():
        quantity, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise InputError(
                f"{where}: optimizer state of '{name}', which the model does not have; see the recipe's model"
            )
        shape = optimizer.moments(parameter).get(quantity, parameter.shape)
        if value.dim() > 0 and value.shape != shape:
            raise InputError(
                f"{where}: optimizer state {key} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(shape)}; this state belongs to another model"
            )
        if not optimizer.owns(parameter):
            continue
        there = before.get(parameter, {}).get(quantity)
        if there is None or there.shape != value.shape:
            there = torch.empty_like(value, device=parameter.device)
        optimizer.state.setdefault(parameter, {})[quantity] = there.copy_(value)
