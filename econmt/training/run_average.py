"""Parameter averaging in a run: when it begins, and swapping the mean in for validation and saving."""

from __future__ import annotations

from contextlib import AbstractContextManager

from econmt.checkpoint.state import TrainingState
from econmt.config import recipe
from econmt.engine.averaging import ParameterAverage, begins
from econmt.engine.parameters import in_float32
from econmt.training.end_of_run import regular
from econmt_ops.optimizers.fused import FusedOptimizer


class RunAverage:
    """Parameter averaging of a run, if the recipe has it.

    ``interval`` is the number of updates between checkpoints.
    """

    def __init__(self, config: recipe.Averaging, optimizer: FusedOptimizer, interval: int) -> None:
        self._config, self._interval = config, interval
        self._optimizer = optimizer
        self._average = None if config.start == "never" else ParameterAverage(optimizer, config.decay)

    def begin(self, state: TrainingState) -> None:
        """Starts averaging at the current update if the recipe says so."""
        state.average_from = state.update if self._config.start == "at-once" else None

    def restore(self, state: TrainingState) -> list[str]:
        """Restores the parameters of a saved run, whose file holds their mean; returns messages for the user."""
        if self._average is None:
            for parameter_state in self._optimizer.state.values():
                parameter_state.pop("average", None)
            state.average_from = None
            return []
        if not self._average.prepare():
            self.begin(state)
            return ["parameter averaging starts anew"]
        if self._count(state):
            self._average.exchange()
        elif state.average_from is None:
            self.begin(state)
        return []

    def updated(self, state: TrainingState) -> None:
        """Adds the parameters after an update to the mean."""
        if self._average is not None and (count := self._count(state)):
            self._average.add(count)

    def in_place(self, state: TrainingState) -> AbstractContextManager[None]:
        """Gives the model the values that are validated and saved within the context: the mean if there is one."""
        if self._average is None or not self._count(state):
            return in_float32(self._optimizer.param_groups[0]["params"])
        return self._average.in_place()

    def checkpoint(self, state: TrainingState) -> list[str]:
        """Decides after a checkpoint, whose metrics are recorded, whether averaging begins; returns messages."""
        rows = regular(state.metrics, self._interval)
        if (
            self._config.start != "non-monotone"
            or state.average_from is not None
            or state.metrics[-1:] != rows[-1:]
        ):
            return []
        perplexities = [row["valid_perplexity"] for row in rows]
        if not begins(perplexities, self._config.non_monotone_interval):
            return []
        state.average_from = state.update
        return [
            f"averaging begins: from now on the mean of the parameters since update {state.update} is validated"
        ]

    def _count(self, state: TrainingState) -> int:
        """Returns the number of updates in the mean."""
        return 0 if state.average_from is None else state.update - state.average_from
