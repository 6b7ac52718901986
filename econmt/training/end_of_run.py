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
    if training.max_updates is not None and state.update >= training.max_updates:
        return f"max_updates {training.max_updates} reached"
    if training.max_epochs is not None and epoch >= training.max_epochs:
        return f"max_epochs {training.max_epochs} reached"
    if training.max_tokens is not None and state.target_tokens >= training.max_tokens:
        return f"max_tokens {training.max_tokens} reached"
    if training.max_seconds is not None and state.seconds >= training.max_seconds:
        return f"max_seconds {training.max_seconds} reached"
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
    spent = state.update * seconds_per_update
    if training.max_updates is not None:
        estimates.append((training.max_updates - state.update) * seconds_per_update)
    if training.max_epochs is not None and epochs_done > 0:
        estimates.append((training.max_epochs / epochs_done - 1) * spent)
    if training.max_tokens is not None and state.target_tokens > 0:
        estimates.append((training.max_tokens / state.target_tokens - 1) * spent)
    if training.max_seconds is not None:
        estimates.append(training.max_seconds - state.seconds)
    return max(0.0, min(estimates)) if estimates else None
