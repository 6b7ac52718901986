"""Parameters that training leaves as they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

from torch import nn

from econmt.config import recipe
from econmt.errors import InputError


def fix_parameters(model: nn.Module, training: recipe.Training) -> None:
    """Fixes the parameters that a recipe names: they get no gradient, no update and no optimizer state.

    Args:
        model: whose parameters are fixed.
        training: the recipe's section.

    Raises:
        InputError: a pattern matches no parameter, or none is left to learn.
    """
    strategy = training.fixed_param_strategy
    known = defaultdict(list)
    for name, part in model.named_parameters(remove_duplicate=False):
        known[part].append(name)
    for pattern in training.fixed_param_names:
        found = [part for part, names in known.items() if any(re.fullmatch(pattern, name) for name in names)]
        if not found:
            there = ", ".join(name for name, _ in model.named_parameters())
            raise InputError(f"training.fixed_param_names {pattern}: matches no parameter; there are {there}")
        for part in found:
            part.requires_grad_(False)
    if strategy is not None:
        stays, layers = _STRATEGIES[strategy], _Layers(model)
        for part, names in known.items():
            # A matrix that a part shares with one that is learnt is learnt.
            if all(stays(name, layers) for name in names):
                part.requires_grad_(False)
    if not any(part.requires_grad for part in known):
        given = [*training.fixed_param_names, *filter(None, [strategy])]
        raise InputError(
            f"training.fixed_param_names, fixed_param_strategy: {', '.join(given)} leaves nothing to learn"
        )


class _Layers:
    """Finds the recurrent layer of a parameter of a translation model by its name."""

    _NAME = re.compile(r"(encoder|decoder)\.(|forward_|backward_|upper_)layers\.(\d+)\.")

    def __init__(self, model: nn.Module) -> None:
        found = [match for name, _ in model.named_parameters() if (match := self._NAME.match(name))]
        # Above the layers of two directions are those of one.
        self._pairs = len({match[3] for match in found if match[2] == "forward_"})
        numbers = [self._number(match) for match in found]
        self._count = {side: 1 + max(number for own, number in numbers if own == side) for side, _ in numbers}

    def _number(self, match: re.Match[str]) -> tuple[str, int]:
        return match[1], int(match[3]) + self._pairs * (match[2] == "upper_")

    def is_outer(self, name: str) -> bool:
        """Returns True for a parameter of the bottom or top layer of its side."""
        match = self._NAME.match(name)
        if match is None:
            return False
        side, number = self._number(match)
        return number in (0, self._count[side] - 1)

    def is_lower_half(self, name: str) -> bool:
        """Returns True for a parameter of the lower half of the encoder's layers."""
        match = self._NAME.match(name)
        if match is None:
            return False
        side, number = self._number(match)
        return side == "encoder" and number < self._count[side] // 2


_OF_SOURCE = ("source_embedding.", "source_factor_embeddings.")
_EMBEDDINGS = (*_OF_SOURCE, "target_embedding.")
_STRATEGIES: dict[str, Callable[[str, _Layers], bool]] = {
    "all_except_decoder": lambda name, _: not name.startswith("decoder."),
    "all_except_outer_layers": lambda name, layers: not layers.is_outer(name),
    "all_except_embeddings": lambda name, _: not name.startswith(_EMBEDDINGS),
    "all_except_output_proj": lambda name, _: not name.startswith(("output.", "readout.", "copying.")),
    "encoder_and_source_embeddings": lambda name, _: name.startswith((*_OF_SOURCE, "encoder.")),
    "encoder_half_and_source_embeddings": lambda name, layers: (
        name.startswith(_OF_SOURCE) or layers.is_lower_half(name)
    ),
}
"""By Sockeye's names: whether a parameter is fixed."""
