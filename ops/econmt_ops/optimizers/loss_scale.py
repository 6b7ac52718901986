"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, "Mixed precision training", section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

INITIAL = 2.0**16
"""Default scale of the first step, that of `torch.amp.GradScaler`."""

WINDOW = 2000
"""Default number of steps without overflow after which the scale doubles, that of `torch.amp.GradScaler`."""

_GROWTH, _BACKOFF = 2.0, 0.5


class LossScale:
    """Factor of the loss that keeps gradients within the range of float16.

    The scale is halved after a step whose gradients overflow, and doubled after ``window`` steps in a row without
    overflow. It is always a power of two, so that multiplying and dividing by it does not round.

    Scale and counter are tensors on the device that keep their addresses, and no method but `state` and `restore` waits
    for the device, so that a captured CUDA graph may contain the others.

    Args:
        device: Device of the parameters.
        initial: Scale of the first step.
        window: Number of steps without overflow after which the scale doubles.

    Attributes:
        scale: Scale of the next step, a float32 scalar.
        overflow: 1.0 if the gradients of the current step overflow, else 0.0, a float32 scalar; None until `unscaled`
            has seen their norm.
    """

    def __init__(self, device: torch.device, initial: float = INITIAL, window: int = WINDOW) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.overflow: Tensor | None = None
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._window = window

    def unscaled(self, norm: Tensor) -> Tensor:
        """Returns the norm of the gradients without the scale, and records whether they overflow."""
        self.overflow = norm.isfinite().logical_not().to(torch.float32)
        return norm / self.scale

    def update(self) -> None:
        """Chooses the scale of the next step, after the current one was done or skipped."""
        assert self.overflow is not None
        torch._amp_update_scale_(self.scale, self._good, self.overflow, _GROWTH, _BACKOFF, self._window)
        self.overflow = None

    def state(self) -> tuple[float, int]:
        """Returns the scale, and the number of steps without overflow since it changed."""
        return float(self.scale), int(self._good)

    def restore(self, scale: float, good: int) -> None:
        """Restores the values from `state`."""
        self.scale.fill_(scale)
        self._good.fill_(good)


@contextmanager
def unchanged_by_overflow(overflow: Tensor | None, *tensors: Tensor) -> Iterator[None]:
    """Restores the tensors after the context if ``overflow``, a scalar, is not zero; see `LossScale.overflow`.

    The device decides, so that a captured graph may contain the context. Nothing is copied if ``overflow`` is None.
    """
    before = [] if overflow is None else [tensor.clone() for tensor in tensors]
    yield
    if overflow is not None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old.where(overflow != 0.0, tensor))
