"""When a run has come to its end, and how much of it is left."""

from __future__ import annotations

from econmt import recipe
from econmt.training.state import TrainingState


def end_reason(training: recipe.Training, state: TrainingState, epoch: int) -> str | None:
    """Why training ends here, as words for a message; None if it goes on.

    Args:
        training: the recipe's limits.
        state: where the run stands.
        epoch: passes over the data that are complete.
    """
    for name, done in _done(state, epoch).items():
        limit = getattr(training, name)
        if limit is not None and done >= limit:
            return f"{name} {limit} reached"
    patience = training.early_stopping.max_num_checkpoint_not_improved
    if patience is not None and state.num_not_improved >= patience:
        metric = "BLEU" if training.early_stopping.metric == "bleu" else "perplexity"
        return f"no better {metric} for {state.num_not_improved} checkpoints"
    return None


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
    """How much there was of what the recipe may limit, by its key."""
    return {
        "max_updates": state.update,
        "max_epochs": epochs,
        "max_tokens": state.target_tokens,
        "max_seconds": state.seconds,
    }
