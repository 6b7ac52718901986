"""The optimizers, and their state as plain named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from econmt import recipe
from econmt.errors import InputError

_NORM_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grads_with_norm_` adds to a norm before it divides by it."""


class FusedOptimizer:
    """SGD, Adam or AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019), each value read and written once.

    What `torch.optim` gives with ``fused=True``, to the bit, by the same kernels. Those classes import torch's compiler
    when they are made, which takes 70 MB and two seconds that a training run can do without.

    Args:
        parameters: all on one device.
        config: the recipe's.

    Attributes:
        param_groups: one, with "params" and "lr", as `torch.optim` has them.
        state: of each parameter, under the names that `torch.optim` gives; empty before the first step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: recipe.Optimizer) -> None:
        self._config = config
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": config.learning_rate}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or fills them with zeros."""
        for parameter in self.param_groups[0]["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        parameters: list[Tensor] = [part for part in self.param_groups[0]["params"] if part.grad is not None]
        gradients = [part.grad for part in parameters if part.grad is not None]
        if parameters and self._config.name == "sgd":
            self._descend(parameters, gradients)
        elif parameters:
            self._adapt(parameters, gradients)

    def _descend(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        config = self._config
        buffers = []
        if config.momentum:
            for parameter in parameters:
                # The first step sets a buffer to its gradient, which adding to zeros does too.
                self.state.setdefault(parameter, {"momentum_buffer": torch.zeros_like(parameter)})
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._fused_sgd_(
            parameters,
            gradients,
            buffers,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            lr=self.param_groups[0]["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _adapt(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        config = self._config
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        algorithm = torch._fused_adam_ if config.name == "adam" else torch._fused_adamw_
        algorithm(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=self.param_groups[0]["lr"],
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=config.weight_decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
        )


def make_optimizer(parameters: Mapping[str, nn.Parameter], config: recipe.Optimizer) -> FusedOptimizer:
    """The optimizer of a recipe over named parameters, all of them on one device.

    The fused kernels are elementwise, so they give the same bits in every run.
    """
    return FusedOptimizer(parameters.values(), config)


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


def set_learning_rate(optimizer: FusedOptimizer, learning_rate: float) -> None:
    """Sets the rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


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
        optimizer.state.setdefault(parameter, {})[quantity] = value.to(parameter.device, copy=True)
