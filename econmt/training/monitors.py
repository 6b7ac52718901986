"""Norms of weights and gradients that a person watches."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from econmt.errors import InputError


class Monitors:
    """Norms of the parameters whose whole name matches a pattern, and of their gradients in the last update.

    Args:
        pattern: a regular expression; None: nothing is watched.
        parameters: of the model, by name.

    Raises:
        InputError: the pattern matches no name.
    """

    def __init__(self, pattern: str | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self._watched = {
            name: part
            for name, part in parameters.items()
            if pattern is not None and re.fullmatch(pattern, name)
        }
        if pattern is not None and not self._watched:
            raise InputError(
                f"training.monitor_pattern {pattern}: matches no parameter; there are {', '.join(parameters)}"
            )
        self._gradients: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._watched)

    @torch.no_grad()
    def look(self) -> None:
        """Takes the norms of the gradients that are there; a part without a gradient has none."""
        self._gradients = [
            part.new_zeros(()) if part.grad is None else torch.linalg.vector_norm(_values(part.grad))
            for part in self._watched.values()
        ]

    @torch.no_grad()
    def columns(self) -> dict[str, float]:
        """Columns of metrics.tsv: weight_norm:NAME and gradient_norm:NAME."""
        found = {f"weight_norm:{name}": float(part.norm()) for name, part in self._watched.items()}
        for name, norm in zip(self._watched, self._gradients, strict=False):
            found[f"gradient_norm:{name}"] = float(norm)
        return found


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
