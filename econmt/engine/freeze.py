"""Freezes parameters, so that training does not change them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

from torch import nn

from econmt.config import recipe
from econmt.errors import InputError


def fix_parameters(model: nn.Module, training: recipe.Training) -> None:
    """Freezes the parameters that a recipe names: they get no gradient, no update and no optimizer state.

    Raises:
        InputError: A pattern matches no parameter, or no parameter remains trainable.
    """
    strategy = training.fixed_param_strategy
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
    if strategy is not None:
        is_frozen, layers = _STRATEGIES[strategy], _Layers(model)
        for parameter, names in names_of.items():
            # A matrix shared with a trainable module stays trainable.
            if all(is_frozen(name, layers) for name in names):
                parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names_of):
        settings = [*training.fixed_param_names, *filter(None, [strategy])]
        raise InputError(
            f"training.fixed_param_names, fixed_param_strategy: {', '.join(settings)} leaves no parameter to train"
        )


class _Layers:
    """Finds the recurrent layer that a parameter of a translation model belongs to, by the parameter's name."""

    _NAME = re.compile(r"(encoder|decoder)\.(|forward_|backward_|upper_)layers\.(\d+)\.")

    def __init__(self, model: nn.Module) -> None:
        matches = [match for name, _ in model.named_parameters() if (match := self._NAME.match(name))]
        # Unidirectional layers lie above the bidirectional ones.
        self._pairs = len({match[3] for match in matches if match[2] == "forward_"})
        numbers = [self._number(match) for match in matches]
        self._count = {
            side: 1 + max(number for layer_side, number in numbers if layer_side == side)
            for side, _ in numbers
        }

    def _number(self, match: re.Match[str]) -> tuple[str, int]:
        return match[1], int(match[3]) + self._pairs * (match[2] == "upper_")

    def find(self, name: str) -> tuple[str, int, int] | None:
        """Returns a parameter's side, its layer's number and the side's number of layers; None outside of layers."""
        match = self._NAME.match(name)
        if match is None:
            return None
        side, number = self._number(match)
        return side, number, self._count[side]

    def is_outer(self, name: str) -> bool:
        """Returns True if a parameter belongs to the bottom or the top layer of its side."""
        layer = self.find(name)
        return layer is not None and layer[1] in (0, layer[2] - 1)

    def is_lower_half(self, name: str) -> bool:
        """Returns True if a parameter belongs to the lower half of the encoder's layers."""
        layer = self.find(name)
        return layer is not None and layer[0] == "encoder" and layer[1] < layer[2] // 2


_SOURCE_EMBEDDINGS = ("source_embedding.", "source_factor_embeddings.")
_EMBEDDINGS = (*_SOURCE_EMBEDDINGS, "target_embedding.")
_STRATEGIES: dict[str, Callable[[str, _Layers], bool]] = {
    "all_except_decoder": lambda name, _: not name.startswith("decoder."),
    "all_except_outer_layers": lambda name, layers: not layers.is_outer(name),
    "all_except_embeddings": lambda name, _: not name.startswith(_EMBEDDINGS),
    "all_except_output_proj": lambda name, _: not name.startswith(("output.", "readout.")),
    "encoder_and_source_embeddings": lambda name, _: name.startswith((*_SOURCE_EMBEDDINGS, "encoder.")),
    "encoder_half_and_source_embeddings": lambda name, layers: (
        name.startswith(_SOURCE_EMBEDDINGS) or layers.is_lower_half(name)
    ),
}
"""Tests whether a parameter is frozen, by Sockeye's name of the strategy."""
