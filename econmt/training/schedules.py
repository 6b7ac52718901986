"""Learning rate schedules."""

from __future__ import annotations

import math
from typing import Any

from econmt.config import recipe


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
