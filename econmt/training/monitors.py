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
        self._gradients: dict[str, Tensor] = {}

    @torch.no_grad()
    def look(self) -> None:
        """Takes the norms of the gradients that are there; a part without a gradient has none."""
        self._gradients = {
            name: part.new_zeros(()) if part.grad is None else torch.linalg.vector_norm(_values(part.grad))
            for name, part in self._watched.items()
        }

    def gradients(self) -> dict[str, float]:
        """The norms that :meth:`look` took last, by the parameter's name; JSON-able."""
        return {name: float(norm) for name, norm in self._gradients.items()}

    def go_on(self, gradients: Mapping[str, float]) -> None:
        """Takes over what :meth:`gradients` told when a run was saved."""
        self._gradients = {name: torch.tensor(gradients[name]) for name in self._watched if name in gradients}

    @torch.no_grad()
    def columns(self) -> dict[str, float]:
        """Columns of metrics.tsv: weight_norm:NAME and gradient_norm:NAME."""
        found = {f"weight_norm:{name}": float(part.norm()) for name, part in self._watched.items()}
        return found | {f"gradient_norm:{name}": norm for name, norm in self.gradients().items()}


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
