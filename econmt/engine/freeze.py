"""Freezes parameters, so that training does not change them."""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn

from econmt.config import recipe
from econmt.errors import InputError


def fix_parameters(model: nn.Module, training: recipe.Training) -> None:
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
