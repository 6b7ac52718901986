"""Parameters as they are trained: some frozen, and matrices perhaps in bfloat16, which are float32 wherever else."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from econmt.config.training import Training
from econmt.errors import InputError


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
