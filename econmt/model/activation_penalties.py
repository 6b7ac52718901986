"""Penalties on the activations of a language model: AR and TAR (Merity, McCann and Socher 2017, arXiv 1708.01009).

With h the top layer's outputs and m their dropout mask, scaled, the loss of a token grows by

    AR = alpha mean((m h)^2)      TAR = beta mean((h_{t+1} - h_t)^2)

where the means are over all rows, positions (pairs of neighbouring ones) and units.

Shapes: B rows, T positions, H width of the top layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class ActivationPenalties(NamedTuple):
    """Weights of the penalties: alpha of AR (``activation``) and beta of TAR (``temporal``)."""

    activation: float = 0.0
    temporal: float = 0.0

    def loss(self, outputs: Tensor, dropped: Tensor, valid: Tensor) -> Tensor:
        """Computes both penalties, times the number of valid positions, a scalar.

        Args:
            outputs: outputs of the top layer before dropout, (B, T, H). dropped: those after dropout.
            valid: True at positions without padding, (B, T).
        """
        _, steps, hidden = outputs.shape
        total = outputs.new_zeros((), dtype=torch.promote_types(outputs.dtype, torch.float32))
        if self.activation > 0.0:
            squares = _SquaredSum.apply(dropped, valid, False)  # type: ignore[no-untyped-call]
            total = total + squares * (self.activation / hidden)
        if self.temporal > 0.0 and steps > 1:
            squares = _SquaredSum.apply(outputs, valid, True)  # type: ignore[no-untyped-call]
            # The mean over T - 1 pairs of a row counts as often as the row has positions, T.
            total = total + squares * (self.temporal / hidden * steps / (steps - 1))
        return total


class _SquaredSum(torch.autograd.Function):
    """Sum of squares of values (B, T, H), or of their differences along T, at valid positions; keeps the values only.

    The sum is float32, or float64 for values of float64.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, valid: Tensor, differences: bool) -> Tensor:
        ctx.save_for_backward(values, valid)
        ctx.differences = differences
        return _SquaredSum._terms(ctx, values, valid).square_().sum()

    @staticmethod
    def _terms(ctx: Any, values: Tensor, valid: Tensor) -> Tensor:
        """Returns the terms whose squares are summed, zero where they do not count."""
        exact = torch.promote_types(values.dtype, torch.float32)
        if not ctx.differences:
            return values.to(exact) * valid[..., None]
        differences = values[:, 1:].to(exact) - values[:, :-1]
        return differences.mul_((valid[:, 1:] & valid[:, :-1])[..., None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        values, valid = ctx.saved_tensors
        terms = _SquaredSum._terms(ctx, values, valid).mul_(2.0 * gradient)
        if not ctx.differences:
            return terms.to(values.dtype), None, None
        made = torch.zeros_like(values, dtype=terms.dtype)
        made[:, 1:] += terms
        made[:, :-1] -= terms
        return made.to(values.dtype), None, None
