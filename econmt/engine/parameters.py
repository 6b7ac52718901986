"""Parameters as they are trained, some frozen and matrices perhaps in bfloat16, and their averages over updates.

Matrices are float32 wherever else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from econmt.config.training import Training
from econmt.errors import InputError
from econmt_ops.optimizers.fused import FusedOptimizer


def prepare_parameters(model: nn.Module, training: Training) -> None:
    """Freezes parameters, see :func:`fix_parameters`, and stores the other matrices in the recipe's type, in place."""
    fix_parameters(model, training)
    for parameter in model.parameters() if training.param_dtype == "bfloat16" else ():
        if parameter.requires_grad and parameter.dim() > 1 and parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


def fix_parameters(model: nn.Module, training: Training) -> None:
    """Freezes the parameters that a recipe names: they get no gradient, no update and no optimizer state.

    Raises:
        InputError: A pattern matches no parameter, or no parameter remains trainable.
    """
    names_of = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    for pattern in training.fixed_param_names:
        matching = [
            parameter
            for parameter, names in names_of.items()
            if any(re.fullmatch(pattern, name) for name in names)
        ]
        if not matching:
            parameter_names = ", ".join(name for name, _ in model.named_parameters())
            raise InputError(
                f"training.fixed_param_names {pattern}: matches no parameter; the model has {parameter_names}"
            )
        for parameter in matching:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names_of):
        raise InputError(
            f"training.fixed_param_names: {', '.join(training.fixed_param_names)} leaves no parameter to train"
        )


@contextmanager
def in_float32(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Gives parameters in bfloat16 equal values in float32 within the context; values set there are rounded after it.

    Their memory in bfloat16 stays, because CUDA graphs refer to its address.
    """
    stored = [(parameter, parameter.data) for parameter in parameters if parameter.dtype == torch.bfloat16]
    for parameter, narrow in stored:
        parameter.data = narrow.float()
    try:
        yield
    finally:
        for parameter, narrow in stored:
            narrow.copy_(parameter.data)
            parameter.data = narrow


_NAME = "average"


class ParameterAverage:
    """Running mean of the parameters, taken after each update since averaging began.

    The mean is stored in the optimizer's state, which is created if necessary, and saved with it. During validation and
    saving, the mean and the parameters are swapped: the model holds the mean, and the optimizer's state holds the
    parameters. ``decay``: see `average_weight`.
    """

    def __init__(self, optimizer: FusedOptimizer, decay: float | None = None) -> None:
        self._optimizer, self._decay = optimizer, decay
        self.prepare()

    def prepare(self) -> bool:
        """Allocates the tensors of the mean where they are missing; returns True if none was missing."""
        self._optimizer.prepare()
        lacking = [part for part in self._parameters if _NAME not in self._optimizer.state.get(part, {})]
        for parameter in lacking:
            self._optimizer.state.setdefault(parameter, {})[_NAME] = torch.zeros_like(parameter)
        return not lacking

    @property
    def _parameters(self) -> list[Tensor]:
        return [part for part in self._optimizer.param_groups[0]["params"] if part.requires_grad]

    @property
    def _averages(self) -> list[Tensor]:
        return [self._optimizer.state[parameter][_NAME] for parameter in self._parameters]

    @torch.no_grad()
    def add(self, number: int) -> None:
        """Adds the parameters after the ``number``-th update since averaging began, counted from 1."""
        # The first update overwrites the mean, whatever it held before.
        torch._foreach_lerp_(self._averages, self._parameters, average_weight(number, self._decay))

    @torch.no_grad()
    def exchange(self) -> None:
        """Swaps the values of the mean and of the parameters."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            saved_parameter = parameter.clone()
            parameter.copy_(average)
            average.copy_(saved_parameter)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the mean into the parameters for the duration of the context."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()


def average_weight(number: int, decay: float | None) -> float:
    """Returns the weight in the mean of the parameters after the ``number``-th update, counted from 1.

    The mean before keeps ``decay`` at most, and at first what polynomial-decay averaging gives it (Shamir and Zhang,
    2013, with eta 9), since early parameters are far from later ones. None weighs all updates equally.
    """
    return 1.0 / number if decay is None else max(10.0 / (number + 9.0), 1.0 - decay)


def begins(perplexities: list[float], interval: int) -> bool:
    """Returns True if averaging begins after the checkpoint whose validation perplexity is the last one.

    It begins when this is above the best one older than ``interval`` checkpoints (NT-ASGD, Merity et al., 2018,
    algorithm 1).
    """
    earlier = perplexities[: -1 - interval]
    return bool(earlier) and perplexities[-1] > min(earlier)
