"""Loss and gradient norm of each update, copied from the device without synchronization.

The loss scale of a run follows from them, and so do messages about failures that stop training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from econmt.checkpoint.state import TrainingState
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.token_store import TokenStore
from econmt.engine.communicator import Communicator
from econmt.engine.step import StepResult
from econmt.errors import TrainingError
from econmt_ops.optimizers.loss_scale import LossScale


class UpdateMetrics(NamedTuple):
    """Metrics of one update.

    Attributes:
        loss: Loss in nats, summed over target tokens.
        gradient_norm: Norm of the gradient before clipping.
        tokens: Number of target tokens.
        indices: Indices of the pairs, an array for each batch.
        loss_scale: Factor of the loss in float16; None in other precisions.
    """

    update: int
    loss: float
    gradient_norm: float
    tokens: int
    indices: Sequence[np.ndarray]
    loss_scale: float | None = None

    @property
    def skipped(self) -> bool:
        """True if only the gradient, times the loss scale, overflows, so that the update changed no parameter."""
        return self.loss_scale is not None and not math.isfinite(self.gradient_norm)

    @property
    def finite(self) -> bool:
        """True if the loss is finite, and the gradient norm is or the update was skipped."""
        return math.isfinite(self.loss) and (math.isfinite(self.gradient_norm) or self.skipped)


class MetricsQueue:
    """Queue that returns the metrics of updates in order.

    On a CPU each is returned at once, so that a loss that is not finite stops training before it reaches the
    parameters. On a GPU that would synchronize at every update; there, values are copied in the background and returned
    one update later, when they have arrived.
    """

    def __init__(self, device: torch.device, communicator: Communicator | None = None) -> None:
        self._device = device
        self._communicator = Communicator() if communicator is None else communicator
        self._waiting: list[tuple[UpdateMetrics, Tensor, torch.cuda.Event]] = []

    def submit(
        self, update: int, result: StepResult, tokens: int, indices: Sequence[np.ndarray]
    ) -> list[UpdateMetrics]:
        """Adds the scalars of an update and returns the metrics that are ready, of this update or the one before."""
        scalars = [scalar.detach().to(result.loss.dtype) for scalar in result if scalar is not None]
        values = torch.stack(scalars)
        metrics = UpdateMetrics(update, 0.0, 0.0, tokens, indices)
        if self._device.type != "cuda":
            return [_with_values(metrics, values)]
        host, event = copy_in_background(values)
        ready = self.flush()
        self._waiting.append((metrics, host, event))
        return ready

    def flush(self) -> list[UpdateMetrics]:
        """Returns all metrics that were not returned yet."""
        ready = []
        for metrics, host, event in self._waiting:
            self._communicator.wait(event)
            ready.append(_with_values(metrics, host))
        self._waiting.clear()
        return ready


def copy_in_background(values: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Starts an asynchronous copy from a GPU; returns the host tensor and an event that marks its completion."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    return host, event


def _with_values(metrics: UpdateMetrics, values: Tensor) -> UpdateMetrics:
    loss, norm, *scale = values.tolist()
    return metrics._replace(loss=loss, gradient_norm=norm, loss_scale=scale[0] if scale else None)


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
            raise TrainingError(
                f"gradients overflow float16 at update {metrics.update} even with a loss scale of {self.last:.3g}; "
                f"{last_good}; lower training.optimizer.learning_rate, or compute in training.precision=float32"
            )

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


def not_finite(metrics: UpdateMetrics, store: TokenStore, last_good: str) -> str:
    """Describes a loss or gradient that is not finite, and the lines of its text."""
    quantity = "loss" if metrics.loss != metrics.loss or abs(metrics.loss) == float("inf") else "gradient"
    lines = [store.location(int(i)) for indices in metrics.indices for i in indices]
    shown = ", ".join(lines[:8]) + (f" and {len(lines) - 8} more" if len(lines) > 8 else "")
    wider = (
        ""
        if metrics.loss_scale is None
        else ", or compute in training.precision=float32, which has a wider range"
    )
    return (
        f"the {quantity} is not finite at update {metrics.update}, pairs {shown}; {last_good}; lower "
        f"training.optimizer.learning_rate or training.gradient_clipping.threshold{wider}"
    )


def out_of_memory(batch: AnyBatch, device: torch.device, last_good: str, *, planned: bool) -> str:
    """Describes a batch that memory does not suffice for, and the remedy.

    ``planned``: a memory plan has already split batches as far as possible.
    """
    advice = (
        "set training.memory_budget=auto, or lower training.batch.size and raise training.update_interval"
    )
    if planned:
        advice = "it cannot be split further: lower data.max_length or the model's sizes"
    return f"out of memory on {device} for a batch of {batch.size_text}; {last_good}; {advice}"
