"""Loss and gradient norm of each update, copied from the device without synchronization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from econmt.engine.communicator import Communicator


class UpdateMetrics(NamedTuple):
    """Metrics of one update: loss in nats summed over target tokens, gradient norm, tokens, and indices of pairs."""

    update: int
    loss: float
    gradient_norm: float
    tokens: int
    indices: Sequence[np.ndarray]

    @property
    def finite(self) -> bool:
        """True if loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


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
        self, update: int, loss: Tensor, norm: Tensor, tokens: int, indices: Sequence[np.ndarray]
    ) -> list[UpdateMetrics]:
        """Adds the scalars of an update and returns the metrics that are ready, of this update or the one before."""
        values = torch.stack((loss.detach(), norm.detach().to(loss.dtype)))
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
    loss, norm = values.tolist()
    return metrics._replace(loss=loss, gradient_norm=norm)
