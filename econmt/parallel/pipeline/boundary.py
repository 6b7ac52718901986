"""Boundary between two autograd graphs, possibly on different ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Boundary:
    """A value from elsewhere, whose gradient is left to be taken back there.

    A leaf would do the same, but would copy each gradient that does not lie in memory as its value does.

    Attributes:
        gradient: of the value, when the way back has come to it.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def cross(self, value: Tensor) -> Tensor:
        """The value, as what a graph begins with."""
        crossed: Tensor = _Cross.apply(value.new_empty(0).requires_grad_(), value.detach(), self)  # type: ignore[no-untyped-call]
        return crossed


class _Cross(torch.autograd.Function):
    """Its first argument makes autograd come here."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, value: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary = boundary
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.boundary.gradient = gradient
        return None, None, None
