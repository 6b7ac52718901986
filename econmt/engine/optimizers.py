"""Creates the optimizer of a recipe, and saves and loads its state as named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.engine.torch_optimizers import TorchOptimizer
from econmt.errors import InputError
from econmt_ops.optimizers import EightBitOptimizer, FusedOptimizer


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: recipe.OptimizerSection,
    owned: Iterable[nn.Parameter] | None = None,
    seed: int = 0,
) -> FusedOptimizer:
    """Creates the optimizer of a recipe over named parameters, all of them on one device.

    Its kernels are deterministic. It updates the ``owned`` parameters only; None: all of them. The ``seed`` is that of
    the rounding of parameters in bfloat16.
    """
    kinds = (FusedOptimizer, EightBitOptimizer, TorchOptimizer)
    kind = next(kind for kind in kinds if config.name in kind.names)
    return kind(parameters.values(), **config.model_dump(), owned=owned, rounding_seed=seed)


def optimizer_tensors(optimizer: FusedOptimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the optimizer's state as tensors named ``<quantity>/<parameter>``, such as ``exp_avg/encoder.weight``."""
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
    """Restores the state from :func:`optimizer_tensors` for the parameters that the optimizer updates.

    Existing state tensors are overwritten in place, because CUDA graphs refer to their addresses.

    Raises:
        InputError: A tensor belongs to no parameter or has another shape; the message names ``where`` and the tensor.
    """
    before = dict(optimizer.state)
    optimizer.state.clear()
    for key, value in tensors.items():
        quantity, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise InputError(
                f"{where}: optimizer state of '{name}', but the model has no such parameter; check the recipe"
            )
        shape = optimizer.moments(parameter).get(quantity, parameter.shape)
        if value.dim() > 0 and value.shape != shape:
            raise InputError(
                f"{where}: optimizer state {key} has shape {tuple(value.shape)}, but the parameter needs "
                f"{tuple(shape)}; this state belongs to another model"
            )
        if not optimizer.owns(parameter):
            continue
        state_tensor = before.get(parameter, {}).get(quantity)
        if state_tensor is None or state_tensor.shape != value.shape:
            state_tensor = torch.empty_like(value, device=parameter.device)
        optimizer.state.setdefault(parameter, {})[quantity] = state_tensor.copy_(value)
