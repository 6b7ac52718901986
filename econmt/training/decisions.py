"""Decisions of a run by its recipe: learning rate of each update, best checkpoint, parameter averaging, and the end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from econmt.checkpoint.state import TrainingState
from econmt.config import recipe
from econmt.config.optimizer import METRICS
from econmt.engine.parameters import ParameterAverage, begins, in_float32
from econmt.training.progress import duration
from econmt_ops.optimizers.fused import FusedOptimizer


class Schedule:
    """Learning rate of each update.

    constant keeps the recipe's rate; inverse-sqrt multiplies it by sqrt(warmup / update) after the warm-up (Vaswani et
    al., 2017, up to a constant); noam has the constant of that paper, (size * warmup) ** -0.5, too; cosine and linear
    fall to ``min_learning_rate`` at ``decay_updates``; plateau-reduce multiplies it
    by ``reduce_factor`` after ``reduce_num_not_improved`` checkpoints without improvement. All of them rise linearly
    from zero over the first ``warmup`` updates. But for plateau-reduce, the rate is a function of the update alone, so
    that a resumed run has the same rates.

    Args:
        config: the recipe's section. learning_rate: rate after the warm-up.
        size: size of the decoder or language model, for noam.
    """

    def __init__(self, config: recipe.ScheduleSection, learning_rate: float, size: int) -> None:
        self._config = config
        self._base = learning_rate
        if config.name == "noam":
            self._base *= (size * config.warmup) ** -0.5
        self.factor = 1.0
        self.num_not_improved = 0

    def learning_rate(self, update: int) -> float:
        """Returns the learning rate of an update, counted from 1."""
        assert update >= 1, update
        warmup = self._config.warmup
        rate = self._base * self.factor
        if update < warmup:
            return rate * update / warmup
        if self._config.name in ("inverse-sqrt", "noam"):
            return rate * math.sqrt(warmup / update)
        end, lowest = self._config.decay_updates, self._config.min_learning_rate
        if end is None or self._config.name not in ("cosine", "linear"):
            return rate
        done = min(1.0, (update - warmup) / (end - warmup))
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self._config.name == "cosine" else 1.0 - done
        return lowest + (rate - lowest) * left

    @property
    def goes_back(self) -> bool:
        """True if a reduction returns to the best parameters, so that their optimizer state must be kept."""
        return self._config.name == "plateau-reduce"

    def checkpoint(self, improved: bool) -> bool:
        """Counts a checkpoint; returns True if the rate was reduced and training must return to the best checkpoint."""
        if not self.goes_back:
            return False
        self.num_not_improved = 0 if improved else self.num_not_improved + 1
        if self.num_not_improved < self._config.reduce_num_not_improved:
            return False
        self.num_not_improved = 0
        self.factor *= self._config.reduce_factor
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to resume, as JSON values."""
        return {"name": self._config.name, "factor": self.factor, "num_not_improved": self.num_not_improved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state; ignores that of a schedule with another name."""
        if state["name"] == self._config.name:
            self.factor = float(state["factor"])
            self.num_not_improved = int(state["num_not_improved"])


def end_reason(
    training: recipe.Training, state: TrainingState, epoch: int, seconds: float | None = None
) -> str | None:
    """Returns the reason why training ends now, for a message; None if it continues.

    ``epoch`` counts completed passes; ``seconds`` of the run are as agreed between ranks, or the state's if None.
    """
    progress = _done(state, epoch)
    if seconds is not None:
        progress["max_seconds"] = seconds
    for name, done in progress.items():
        limit = getattr(training, name)
        if limit is not None and done >= limit:
            return f"{name} {limit} reached"
    patience = training.early_stopping.max_num_checkpoint_not_improved
    if patience is not None and state.num_not_improved >= patience:
        return f"no better {METRICS[training.early_stopping.metric].title} for {state.num_not_improved} checkpoints"
    return None


Row = Mapping[str, float]


def regular(rows: Sequence[Row], interval: int) -> list[Row]:
    """Returns the rows of metrics of all checkpoints but those between, where a run ended that goes on.

    Decisions are made from these, so that a run in parts decides as one that never stopped.
    """
    return [row for row in rows if row["update"] % interval == 0]


def judge_checkpoint(training: recipe.Training, state: TrainingState, columns: Row) -> bool | None:
    """Notes whether the checkpoint at the current update, of these figures, is the best so far, as the first is.

    Returns:
        True if it is better than all regular ones before it, whose metrics are recorded; None if it is not regular.
    """
    metric = METRICS[training.early_stopping.metric]
    score = columns[metric.column]

    def improves(best: float | None) -> bool:
        return best is None or math.isnan(best) or (score > best if metric.higher else score < best)

    if improves(state.best_score):
        state.best_score, state.best_update = score, state.update
    if state.update % training.checkpoint_interval:
        return None
    regular_rows = (row for row in state.metrics if row["update"] == state.best_regular)
    improved = improves(next((row.get(metric.column) for row in regular_rows), None))
    state.num_not_improved = 0 if improved else state.num_not_improved + 1
    if improved:
        state.best_regular = state.update
    return improved


TWENTY_BLEU = 600, 1800
"""Fewest and most updates after which shipped recipes had 20 BLEU on validation."""

RECENT = 180.0
"""Seconds over which the pace is measured for the remaining time, since the load of machines changes."""


class Pace:
    """Recent seconds per update, validation and saving included."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def seconds_per_update(self, seconds: float, update: int) -> float:
        """Returns the seconds per update in the last minutes of this process; at its beginning, in the whole run."""
        samples = self._samples
        if not samples or update > samples[-1][1]:
            samples.append((seconds, update))
        while len(samples) > 2 and seconds - samples[1][0] >= RECENT:
            samples.popleft()
        (began, first), (now, last) = samples[0], samples[-1]
        return (now - began) / (last - first) if last > first else seconds / max(update, 1)


def share_done(training: recipe.Training, state: TrainingState, epochs_done: float) -> float | None:
    """Returns the completed share of a run, from 0 to 1, by the nearest limit; None without a limit.

    ``epochs_done`` includes the fraction of the current pass.
    """
    done = {name: (value, getattr(training, name)) for name, value in _done(state, epochs_done).items()}
    shares = [value / limit for value, limit in done.values() if limit]
    return min(1.0, max(shares)) if shares else None


def seconds_left(
    training: recipe.Training, state: TrainingState, epochs_done: float, seconds_per_update: float
) -> float | None:
    """Estimates the remaining seconds from the limits and the recent pace; None without a limit."""
    estimates = []
    for name, done in _done(state, epochs_done).items():
        limit = getattr(training, name)
        if limit is not None and name == "max_seconds":
            estimates.append(limit - done)
        elif limit is not None and done > 0:
            estimates.append((limit / done - 1) * state.update * seconds_per_update)
    return max(0.0, min(estimates)) if estimates else None


def outlook(settings: recipe.Recipe, batches_per_epoch: int, seconds: float) -> str:
    """Describes how long a run takes if an update takes ``seconds``, as the first ones did; validation comes on top."""
    interval, last = settings.training.checkpoint_interval, settings.training.max_updates
    text = "at the speed of the first updates, without validation: an epoch takes about "
    text += duration(seconds * batches_per_epoch / settings.training.update_interval)
    if settings.task == "translation" and settings.training.decode_and_evaluate:
        text += f", the first BLEU comes at update {interval:,} after about {duration(seconds * interval)}"
        few, many = TWENTY_BLEU
        if last is None or last >= many:
            text += f"; 20 BLEU took recipes multi30k and tatoeba {few:,} to {many:,} updates, "
            text += f"about {duration(seconds * few)} to {duration(seconds * many)} here"
    return text


def _done(state: TrainingState, epochs: float) -> dict[str, float]:
    """Returns the progress of each quantity that a recipe can limit, by its key."""
    return {"max_updates": state.update, "max_epochs": epochs, "max_seconds": state.seconds}


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
