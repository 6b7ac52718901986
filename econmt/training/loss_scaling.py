"""Loss scale of a run in float16: what is counted, shown and saved, and the bound below which the run stops."""

from __future__ import annotations

from econmt.checkpoint.state import TrainingState
from econmt.errors import TrainingError
from econmt.training.failures import scale_too_small
from econmt.training.update_metrics import UpdateMetrics
from econmt_ops.optimizers.loss_scale import LossScale

LEAST = 1e-4
"""Loss scale below which a run stops, that of fairseq."""


class LossScaling:
    """Loss scale of a run, if it trains in float16; otherwise no method has an effect.

    Attributes:
        last: Loss scale of the last update that was counted; None before the first, and in other precisions.
    """

    def __init__(self, loss_scale: LossScale | None) -> None:
        self._loss_scale = loss_scale
        self.last: float | None = None

    def count(self, metrics: UpdateMetrics, state: TrainingState, last_good: str) -> None:
        """Counts an update that was skipped.

        Raises:
            TrainingError: The loss scale has become too small.
        """
        self.last = metrics.loss_scale
        state.skipped += metrics.skipped
        if self.last is not None and self.last < LEAST:
            raise TrainingError(scale_too_small(metrics, last_good))

    def columns(self, state: TrainingState) -> dict[str, float]:
        """Returns the columns of metrics.tsv: the loss scale of the next update, and the number of skipped updates."""
        if self._loss_scale is None:
            return {}
        return {"loss_scale": self._loss_scale.state()[0], "skipped_updates": float(state.skipped)}

    def store(self, state: TrainingState) -> None:
        """Stores the loss scale in the state of the run, which is saved."""
        if self._loss_scale is not None:
            scale, good = self._loss_scale.state()
            state.loss_scale = {"scale": scale, "good": good}

    def restore(self, state: TrainingState) -> None:
        """Restores the loss scale of a saved run; one that was in another precision starts anew."""
        if self._loss_scale is None:
            state.loss_scale = {}
        elif state.loss_scale:
            self._loss_scale.restore(**state.loss_scale)
