"""Determines when a run ends, and how much of it remains."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from econmt.checkpoint.state import TrainingState
from econmt.config import recipe
from econmt.config.optimizer import METRICS


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


def _done(state: TrainingState, epochs: float) -> dict[str, float]:
    """Returns the progress of each quantity that a recipe can limit, by its key."""
    return {
        "max_updates": state.update,
        "max_epochs": epochs,
        "max_seconds": state.seconds,
    }
