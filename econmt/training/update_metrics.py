"""The loss and gradient norm of each update, brought from the device without making it wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from econmt.engine.communicator import Communicator, Event


class UpdateMetrics(NamedTuple):
    """One update: loss in nats summed over its target tokens, norm of the gradient, tokens, and pairs in the store."""

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
    """Hands out the metrics of updates in their order.

    On the CPU each comes at once, so that a loss that is not finite stops training before it reaches the parameters.
    On a GPU that would make the processor wait for it at every update; so each is copied in the background and comes
    one update late, when it has long arrived.
    """

    def __init__(self, device: torch.device, communicator: Communicator | None = None) -> None:
        self._device = device
        self._communicator = Communicator() if communicator is None else communicator
        self._waiting: list[tuple[UpdateMetrics, Tensor, Event]] = []

    def submit(
        self, update: int, loss: Tensor, norm: Tensor, tokens: int, indices: Sequence[np.ndarray]
    ) -> list[UpdateMetrics]:
        """Takes one update's scalars and returns what is ready, of this update or the one before."""
        values = torch.stack((loss.detach(), norm.detach().to(loss.dtype)))
        metrics = UpdateMetrics(update, 0.0, 0.0, tokens, indices)
        if self._device.type != "cuda":
            return [_filled(metrics, values)]
        host, event = copy_in_background(values)
        ready = self.flush()
        self._waiting.append((metrics, host, event))
        return ready

    def flush(self) -> list[UpdateMetrics]:
        """All that were not handed out yet."""
        ready = []
        for metrics, host, event in self._waiting:
            self._communicator.wait(event)
            ready.append(_filled(metrics, host))
        self._waiting.clear()
        return ready


def copy_in_background(values: Tensor) -> tuple[Tensor, Event]:
    """Starts a copy from a GPU; returns where it goes and what tells that it is there."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    return host, event


def _filled(metrics: UpdateMetrics, values: Tensor) -> UpdateMetrics:
    loss, norm = values.tolist()
    return metrics._replace(loss=loss, gradient_norm=norm)
