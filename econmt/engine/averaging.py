"""The mean of the parameters over the updates (Polyak and Juditsky, 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from econmt_ops.optimizer import FusedOptimizer

_NAME = "average"


class ParameterAverage:
    """The mean of the parameters after each update since it began.

    It lies in the optimizer's state, and is saved with it. While it stands in the place of the parameters, which is so
    whenever they are validated or saved, the state has the parameters themselves.

    Args:
        optimizer: of all parameters; its own state is made if it is not there.
        decay: the share of the mean before that an update keeps at most; None: all updates weigh the same.
    """

    def __init__(self, optimizer: FusedOptimizer, decay: float | None = None) -> None:
        self._optimizer = optimizer
        self._least = 0.0 if decay is None else 1.0 - decay
        self.prepare()

    def prepare(self) -> bool:
        """Makes the room for it where there is none; whether it was all there."""
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
        """Takes in the parameters after the ``number``-th update since it began, from 1."""
        # The first makes it equal to them, whatever was there before.
        torch._foreach_lerp_(self._averages, self._parameters, max(1.0 / number, self._least))

    @torch.no_grad()
    def exchange(self) -> None:
        """Lets the mean and the parameters change places."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the mean stands where the parameters stood."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()


def begins(perplexities: list[float], interval: int) -> bool:
    """Returns True if averaging begins: the perplexity is above the best of all but the last ``interval`` before it.

    NT-ASGD (Merity et al., 2018, algorithm 1).

    Args:
        perplexities: of all checkpoints, the newest last.
        interval: n of the paper.
    """
    earlier = perplexities[: -1 - interval]
    return bool(earlier) and perplexities[-1] > min(earlier)
