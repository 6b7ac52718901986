"""Averages the parameters over training updates (Polyak and Juditsky, 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from econmt_ops.optimizers.fused import FusedOptimizer

_NAME = "average"


class ParameterAverage:
    """Running mean of the parameters, taken after each update since averaging began.

    The mean is stored in the optimizer's state, which is created if necessary, and saved with it. During validation and
    saving, the mean and the parameters are swapped: the model holds the mean, and the optimizer's state holds the
    parameters. The previous mean has the weight ``decay`` in an update at most; None weighs all updates equally.
    """

    def __init__(self, optimizer: FusedOptimizer, decay: float | None = None) -> None:
        self._optimizer = optimizer
        self._least_weight = 0.0 if decay is None else 1.0 - decay
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
        torch._foreach_lerp_(self._averages, self._parameters, max(1.0 / number, self._least_weight))

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


def begins(perplexities: list[float], interval: int) -> bool:
    """Returns True if averaging begins after the checkpoint whose validation perplexity is the last one.

    It begins when this is above the best one older than ``interval`` checkpoints (NT-ASGD, Merity et al., 2018,
    algorithm 1).
    """
    earlier = perplexities[: -1 - interval]
    return bool(earlier) and perplexities[-1] > min(earlier)
