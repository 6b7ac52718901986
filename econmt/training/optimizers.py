"""The optimizers, and their state as plain named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from econmt import recipe
from econmt.errors import InputError


def make_optimizer(parameters: Mapping[str, nn.Parameter], config: recipe.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of a recipe over named parameters, all of them on one device.

    The fused implementations are elementwise, so they give the same bits in every run, and touch each value once.
    """
    values = list(parameters.values())
    if config.name == "sgd":
        return torch.optim.SGD(
            values,
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            fused=True,
        )
    algorithm = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return algorithm(
        values,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state as tensors named ``<quantity>/<parameter>``, for example ``exp_avg/encoder.weight``."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for quantity, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # SGD without momentum keeps an empty buffer
                tensors[f"{quantity}/{name}"] = value
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    where: str,
) -> None:
    """Puts back what :func:`optimizer_tensors` gave.

    Raises:
        InputError: naming ``where`` and the tensor, if one belongs to no parameter or has another shape.
    """
    optimizer.state.clear()
    for key, value in tensors.items():
        quantity, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise InputError(
                f"{where}: optimizer state of '{name}', which the model does not have; see the recipe's model"
            )
        if value.dim() > 0 and value.shape != parameter.shape:
            raise InputError(
                f"{where}: optimizer state {key} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(parameter.shape)}; this state belongs to another model"
            )
        optimizer.state[parameter][quantity] = value.to(parameter.device, copy=True)
