"""The loss and gradient norm of each update, brought from the device without making it wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Reading(NamedTuple):
    """One update: loss in nats summed over its target tokens, norm of the gradient, tokens, and pairs in the store."""

    update: int
    loss: float
    gradient_norm: float
    tokens: int
    indices: Sequence[np.ndarray]

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class Readings:
    """Hands out readings in the order of the updates.

    On the CPU each comes at once, so that a loss that is not finite stops training before it reaches the parameters.
    On a GPU reading at once would make the processor wait for it at every update; so each is copied in the background
    and comes one update late, when it has long arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[tuple[Reading, Tensor, Callable[[], None]]] = []

    def submit(
        self, update: int, loss: Tensor, norm: Tensor, tokens: int, indices: Sequence[np.ndarray]
    ) -> list[Reading]:
        """Takes one update's scalars and returns the readings that are ready, of this update or the one before."""
        values = torch.stack((loss.detach(), norm.detach().to(loss.dtype)))
        reading = Reading(update, 0.0, 0.0, tokens, indices)
        if self._device.type != "cuda":
            return [_filled(reading, values)]
        host, arrived = copy_in_background(values)
        ready = self.flush()
        self._waiting.append((reading, host, arrived))
        return ready

    def flush(self) -> list[Reading]:
        """All readings not handed out yet."""
        ready = []
        for reading, host, arrived in self._waiting:
            arrived()
            ready.append(_filled(reading, host))
        self._waiting.clear()
        return ready


def copy_in_background(values: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Starts a copy from a GPU; returns where it goes and a function that waits until it is there."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    return host, event.synchronize


def _filled(reading: Reading, values: Tensor) -> Reading:
    loss, norm = values.tolist()
    return reading._replace(loss=loss, gradient_norm=norm)
