"""The optimizers, and their state as plain named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from econmt import recipe
from econmt.errors import InputError

_NORM_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grads_with_norm_` adds to a norm before it divides by it."""


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


def clip_gradient(parameters: Iterable[nn.Parameter], clipping: recipe.GradientClipping) -> Tensor:
    """Bounds the gradient; what `torch.nn.utils.clip_grad_norm_` gives, to the bit.

    That multiplies all gradients even if the norm is within the bound, by 1. On the CPU looking costs nothing, and all
    gradients are not read and written once more; a GPU would have to be waited for.

    Returns:
        The norm of all gradients together before clipping, a scalar on their device.
    """
    values = list(parameters)
    norm = torch.nn.utils.get_total_norm([value.grad for value in values if value.grad is not None])
    if clipping.type == "norm" and (norm.is_cuda or not clipping.threshold / (norm + _NORM_EPSILON) >= 1.0):
        torch.nn.utils.clip_grads_with_norm_(values, clipping.threshold, norm)
    elif clipping.type == "value":
        torch.nn.utils.clip_grad_value_(values, clipping.threshold)
    return norm


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
