"""Norms of selected weights and gradients for metrics.tsv."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from econmt.errors import InputError


class Monitors:
    """Norms of the parameters whose full names match a pattern, and of their gradients in the last update.

    Raises:
        InputError: The pattern matches no name.
    """

    def __init__(self, pattern: str | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self._watched = {
            name: parameter
            for name, parameter in parameters.items()
            if pattern is not None and re.fullmatch(pattern, name)
        }
        if pattern is not None and not self._watched:
            raise InputError(
                f"training.monitor_pattern {pattern}: matches no parameter; the model has {', '.join(parameters)}"
            )
        self._gradients: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self, loss_scale: Tensor | None = None) -> None:
        """Computes the norms of the current gradients; 0 for a parameter without gradient.

        Gradients contain the factor ``loss_scale``, which norms do not. Of a gradient that overflows, the norm of the
        update before is kept.
        """
        before = self._gradients
        self._gradients = {
            name: parameter.new_zeros(())
            if parameter.grad is None
            else torch.linalg.vector_norm(_values(parameter.grad))
            for name, parameter in self._watched.items()
        }
        if loss_scale is None:
            return
        for name, norm in self._gradients.items():
            last = before[name].to(norm.device) if name in before else torch.zeros_like(norm)
            self._gradients[name] = torch.where(norm.isfinite(), norm / loss_scale, last)

    def gradients(self) -> dict[str, float]:
        """Returns the norms from the last :meth:`measure` by parameter name, as JSON values."""
        return {name: float(norm) for name, norm in self._gradients.items()}

    def restore(self, gradients: Mapping[str, float]) -> None:
        """Restores norms that :meth:`gradients` returned when a run was saved."""
        self._gradients = {name: torch.tensor(gradients[name]) for name in self._watched if name in gradients}

    @torch.no_grad()
    def columns(self) -> dict[str, float]:
        """Returns the columns weight_norm:NAME and gradient_norm:NAME of metrics.tsv."""
        norms = {f"weight_norm:{name}": float(parameter.norm()) for name, parameter in self._watched.items()}
        return norms | {f"gradient_norm:{name}": norm for name, norm in self.gradients().items()}


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
