"""Boundary between two autograd graphs, which may be on different ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Boundary:
    """Value from another autograd graph, whose gradient is stored to be passed back there.

    A leaf tensor would do the same, but would copy each gradient whose memory layout differs from its value's.

    Attributes:
        gradient: Gradient of the value, once the backward pass has reached it.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def cross(self, value: Tensor) -> Tensor:
        """Returns the value as an input of a new graph."""
        crossed: Tensor = _Cross.apply(value.new_empty(0).requires_grad_(), value.detach(), self)  # type: ignore[no-untyped-call]
        return crossed


class _Cross(torch.autograd.Function):
    """Identity function that stores its gradient; the first argument makes autograd call the backward pass."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, value: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.boundary.gradient = gradient
        return None, None, None
