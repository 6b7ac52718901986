"""When a run has come to its end, and how much of it is left."""

from __future__ import annotations

from collections import deque

from econmt.checkpoint.state import TrainingState
from econmt.config import recipe
from econmt.config.optimizer import METRICS


def end_reason(
    training: recipe.Training, state: TrainingState, epoch: int, seconds: float | None = None
) -> str | None:
    """Why training ends here, as words for a message; None if it goes on.

    Args:
        training: the recipe's limits.
        state: where the run stands.
        epoch: passes over the data that are complete.
        seconds: how long the run has taken, by the clock that all ranks go by; None: the state's.
    """
    found = _done(state, epoch)
    if seconds is not None:
        found["max_seconds"] = seconds
    for name, done in found.items():
        limit = getattr(training, name)
        if limit is not None and done >= limit:
            return f"{name} {limit} reached"
    patience = training.early_stopping.max_num_checkpoint_not_improved
    if patience is not None and state.num_not_improved >= patience:
        return f"no better {METRICS[training.early_stopping.metric].title} for {state.num_not_improved} checkpoints"
    return None


RECENT = 180.0
"""Seconds of a run by which it is told how long the rest takes: machines get busy and idle again."""


class Pace:
    """Seconds that an update has taken lately, validation and saving included."""

    def __init__(self) -> None:
        self._known: deque[tuple[float, int]] = deque()

    def of(self, seconds: float, update: int) -> float:
        """Seconds an update, of the last minutes that this process has seen; at its beginning those of the whole run.

        Args:
            seconds: how long the run has taken. update: the updates that it has done.
        """
        known = self._known
        if not known or update > known[-1][1]:
            known.append((seconds, update))
        while len(known) > 2 and seconds - known[1][0] >= RECENT:
            known.popleft()
        (began, first), (now, last) = known[0], known[-1]
        return (now - began) / (last - first) if last > first else seconds / max(update, 1)


def share_done(training: recipe.Training, state: TrainingState, epochs_done: float) -> float | None:
    """Returns the completed share of a run, from 0 to 1, by its nearest limit, or None without limits.

    Args:
        training: the recipe's limits. state: where the run stands.
        epochs_done: passes over the data, with the running one's share.
    """
    done = {name: (value, getattr(training, name)) for name, value in _done(state, epochs_done).items()}
    shares = [value / limit for value, limit in done.values() if limit]
    return min(1.0, max(shares)) if shares else None


def seconds_left(
    training: recipe.Training, state: TrainingState, epochs_done: float, seconds_per_update: float
) -> float | None:
    """An estimate from the limits and the pace so far; None where no limit tells.

    Args:
        training: the recipe's limits.
        state: where the run stands.
        epochs_done: passes over the data, with the running one's share.
        seconds_per_update: recent pace.
    """
    estimates = []
    for name, done in _done(state, epochs_done).items():
        limit = getattr(training, name)
        if limit is not None and name == "max_seconds":
            estimates.append(limit - done)
        elif limit is not None and done > 0:
            estimates.append((limit / done - 1) * state.update * seconds_per_update)
    return max(0.0, min(estimates)) if estimates else None


def _done(state: TrainingState, epochs: float) -> dict[str, float]:
    """Returns the current value of each quantity that the recipe may limit, by key."""
    return {
        "max_updates": state.update,
        "max_epochs": epochs,
        "max_tokens": state.target_tokens,
        "max_seconds": state.seconds,
    }
