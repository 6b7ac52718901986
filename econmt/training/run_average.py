"""The mean of a run's parameters: when it begins, and where it stands in their place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from econmt.checkpoint.state import TrainingState
from econmt.config import recipe
from econmt.engine.averaging import ParameterAverage, begins
from econmt_ops.optimizer import FusedOptimizer


class RunAverage:
    """Parameter averaging of a run, if the recipe asks for it.

    Args:
        config: the recipe's.
        optimizer: of the run.
    """

    def __init__(self, config: recipe.Averaging, optimizer: FusedOptimizer) -> None:
        self._config = config
        self._optimizer = optimizer
        self._average = None if config.start == "never" else ParameterAverage(optimizer, config.decay)

    def begin(self, state: TrainingState) -> None:
        """Takes note of where a run begins, or goes on without a mean."""
        state.average_from = state.update if self._config.start == "at-once" else None

    def go_on(self, state: TrainingState) -> list[str]:
        """Puts the parameters, which a saved state has in the place of their mean, back; returns what is to be told."""
        if self._average is None:
            for kept in self._optimizer.state.values():
                kept.pop("average", None)
            state.average_from = None
            return []
        if not self._average.prepare():
            self.begin(state)
            return ["the mean of the parameters begins anew"]
        if self._count(state):
            self._average.exchange()
        elif state.average_from is None:
            self.begin(state)
        return []

    def updated(self, state: TrainingState) -> None:
        """Takes in the parameters of an update."""
        if self._average is not None and self._count(state):
            self._average.add(self._count(state))

    def in_place(self, state: TrainingState) -> AbstractContextManager[None]:
        """Within it the model has the mean of the parameters, if there is one."""
        if self._average is None or not self._count(state):
            return nullcontext()
        return self._average.in_place()

    def checkpoint(self, state: TrainingState) -> list[str]:
        """Takes note of a checkpoint, whose row of metrics is there; returns what is to be told."""
        if self._config.start != "non-monotone" or state.average_from is not None:
            return []
        perplexities = [row["valid_perplexity"] for row in state.metrics]
        if not begins(perplexities, self._config.non_monotone_interval):
            return []
        state.average_from = state.update
        return [
            f"averaging begins: from now on the mean of the parameters since update {state.update} is validated"
        ]

    def _count(self, state: TrainingState) -> int:
        """Updates that the mean is of."""
        return 0 if state.average_from is None else state.update - state.average_from
