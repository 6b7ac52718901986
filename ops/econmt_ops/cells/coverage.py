"""One step of coverage C (B, S, W), the attention that each source position got so far (Tu et al. 2016).

With the attention weights a (B, S) of a step, the stack's output h and numbers of each position s (B, S, P):

    sum             C' = C + s a
    activation f    C' = f(u),   u = s + w a + W_h h + W_c C
    gru             a step of `econmt_ops.cells.gru` from C with the products   u = s + w a + W_h h, v = W_c C

`econmt_ops.Coverage` describes the weights. Everything is in the accumulate type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.cells.gru import GRU
from econmt_ops.core.weights import Coverage

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "softrelu": functional.softplus,
}

_SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda y: 1.0 - y * y,
    "sigmoid": lambda y: y * (1.0 - y),
    "relu": lambda y: (y > 0).to(y.dtype),
    "softrelu": lambda y: -torch.expm1(-y),
}
"""Derivatives of the activations, given their values."""


def coverage_forward(weights: Coverage, coverage: Tensor, attention: Tensor, state: Tensor | None) -> Tensor:
    """Computes the coverage after a step.

    Args:
        weights: Weights; key and state are not read.
        coverage: (B, S, W), before the step.
        attention: (B, S), the attention weights of the step.
        state: (B, P), the product of the stack's output; None for "sum".
    """
    share = attention.unsqueeze(2)
    if weights.attention is None or weights.recurrent is None or state is None:
        return coverage + weights.shares * share
    read = weights.shares + weights.attention * share + state.unsqueeze(1)
    recurrent = torch.matmul(coverage, weights.recurrent.t())
    if weights.kind != "gru":
        return ACTIVATIONS[weights.kind](read + recurrent)
    return GRU.forward(read, recurrent, (coverage,))[0]


class CoverageGradients(NamedTuple):
    """Gradients of a step: those of the arguments, and those of the weights, None where there is no weight."""

    coverage: Tensor
    attention: Tensor
    state: Tensor | None
    shares: Tensor
    weight: Tensor | None
    recurrent: Tensor | None


def coverage_backward(
    weights: Coverage, before: Tensor, after: Tensor, attention: Tensor, state: Tensor | None, dafter: Tensor
) -> CoverageGradients:
    """Computes the gradients of :func:`coverage_forward`, given its result and the gradient of that, (B, S, W)."""
    share = attention.unsqueeze(2)
    if weights.attention is None or weights.recurrent is None or state is None:
        dattention = (dafter * weights.shares).sum(2)
        return CoverageGradients(dafter, dattention, None, (dafter * share).sum(2, keepdim=True), None, None)
    if weights.kind == "gru":
        read = weights.shares + weights.attention * share + state.unsqueeze(1)
        product = torch.matmul(before, weights.recurrent.t())
        dread, drecurrent, (through,), _ = GRU.backward(read, product, (before,), (after,), (dafter,))
    else:
        dread = drecurrent = dafter * _SLOPES[weights.kind](after)
        through = torch.zeros_like(dafter)
    return CoverageGradients(
        through + torch.matmul(drecurrent, weights.recurrent),
        torch.matmul(dread, weights.attention),
        dread.sum(1),
        dread,
        torch.einsum("bsp,bs->p", dread, attention),
        torch.einsum("bsp,bsw->pw", drecurrent, before),
    )
