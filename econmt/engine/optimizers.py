"""Creates the optimizer of a recipe, fused or torch's own, and saves and loads its state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._adafactor import adafactor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop

from econmt.config import recipe
from econmt.config.optimizer import NOT_CAPTURABLE
from econmt.errors import InputError
from econmt_ops.core.arguments import Update
from econmt_ops.optimizers import EightBitOptimizer, FusedOptimizer
from econmt_ops.optimizers.loss_scale import unchanged_by_overflow

_FUNCTIONS: dict[str, Callable[..., None]] = {
    "nadam": nadam,
    "radam": radam,
    "adagrad": adagrad,
    "adadelta": adadelta,
    "rmsprop": rmsprop,
    "adafactor": adafactor,
}


class TorchOptimizer(FusedOptimizer):
    """Optimizer of torch.optim that is not fused, by its name, computed by torch's own function for lists of tensors.

    Clipping, loss scale, row-sparse gradients and parameters in bfloat16 work as in :class:`FusedOptimizer`. Adagrad
    and Adafactor wait for a GPU in each step, so that CUDA graphs cannot capture them.

    Args: as in :class:`FusedOptimizer`, with these meanings:
        betas: Decays of nadam and radam; the second is also alpha of rmsprop and rho of adadelta.
        eps: As in torch.optim; for adafactor its first epsilon.
        weight_decay: L2 penalty; for adafactor decoupled.
        momentum: Momentum of rmsprop.
    """

    names = tuple(_FUNCTIONS)
    whole = ("adafactor",)

    def moments(self, parameter: Tensor) -> dict[str, torch.Size]:
        """Returns the shapes of the state; for a matrix Adafactor keeps one mean per row and per column."""
        shape = parameter.shape
        if self._name == "adafactor" and parameter.dim() > 1:
            columns = (*shape[:-2], 1, shape[-1])
            return {"row_var": torch.Size([*shape[:-1], 1]), "col_var": torch.Size(columns)}
        names = {
            "adagrad": ("sum",),
            "adadelta": ("square_avg", "acc_delta"),
            "rmsprop": ("square_avg", *(("momentum_buffer",) if self._momentum else ())),
            "adafactor": ("variance",),
        }
        return dict.fromkeys(names.get(self._name, ("exp_avg", "exp_avg_sq")), shape)

    def _first_numbers(self, parameter: Tensor) -> dict[str, Tensor]:
        numbers = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        if self._name == "nadam":
            numbers["mu_product"] = torch.ones((), dtype=torch.float32, device=parameter.device)
        return numbers

    def _advance(self, numbers: list[dict[str, Tensor]]) -> None:
        super()._advance(numbers)
        for scalars in numbers if self._name == "nadam" else ():
            scalars["mu_before"] = scalars["mu_product"].clone()

    def _updates(self, parameters: Iterable[Tensor]) -> list[Update]:
        if self._name in self.whole:
            self.make_dense()
        return super()._updates(parameters)

    def _run(self, updates: list[Update], divisor: Tensor | None) -> None:
        for update in updates:
            if divisor is not None:
                update.gradient.div_(divisor)
            products = [update.numbers["mu_product"]] if self._name == "nadam" else []
            with unchanged_by_overflow(self._overflow, update.values, *update.moments, *products):
                self._run_by_torch(update)

    def _run_by_torch(self, update: Update) -> None:
        """Updates values and moments; the step that torch's function counts is a copy."""
        tensors: list[Any] = [[part] for part in (update.values, update.gradient, *update.moments)]
        step = [(update.numbers["step"] - 1).clamp_(min=0)]  # 0 also in a first step that overflows
        how: dict[str, Any] = {"lr": self.param_groups[0]["lr"], "weight_decay": self._weight_decay}
        how |= {"foreach": False, "maximize": False}
        if self._name != "adafactor":
            how["eps"] = self._eps
        if self._name not in NOT_CAPTURABLE:
            how["capturable"] = update.values.is_cuda
        first, second = self._betas
        if self._name == "nadam":
            # A parameter that is updated in several parts begins each from the same product.
            tensors.append([update.numbers["mu_product"].copy_(update.numbers["mu_before"])])
            how |= {"beta1": first, "beta2": second, "momentum_decay": 4e-3}
        elif self._name == "radam":
            how |= {"beta1": first, "beta2": second}
        elif self._name == "adagrad":
            how["lr_decay"] = 0.0
        elif self._name == "adadelta":
            how["rho"] = second
        elif self._name == "rmsprop":
            tensors = [*tensors[:3], [], tensors[3] if self._momentum else []]
            how |= {"alpha": second, "momentum": self._momentum, "centered": False}
        else:
            values, gradient, *means = tensors
            # Means of rows and columns of a matrix, or the squares of a vector.
            tensors = [values, gradient, *([*means, [None]] if len(means) > 1 else [[None], [None], *means])]
            how |= {"d": 1.0, "beta2_decay": -0.8, "eps1": self._eps, "eps2": 1e-3}
        _FUNCTIONS[self._name](*tensors, step, **how)


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
