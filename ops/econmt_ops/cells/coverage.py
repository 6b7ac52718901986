"""One step of coverage C (B, S, W), the attention that each source position got so far (Tu et al. 2016).

With the attention weights a (B, S) of a step, the stack's output h and numbers of each position s (B, S, P):

    sum             C' = C + s a
    activation f    C' = f(u),   u = s + w a + W_h h + W_c C
    gru             r, z = sigmoid(u + v), n = tanh(u_n + r v_n), C' = (1 - z) n + z C,   u = s + w a + W_h h, v = W_c C

`econmt_ops.Coverage` describes the weights. Everything is in the accumulate type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

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


class CoverageWeights(NamedTuple):
    """Kind, shares (B, S, P), and the weights attention (P,) and recurrent (P, W), None for "sum"."""

    kind: str
    shares: Tensor
    attention: Tensor | None
    recurrent: Tensor | None


def coverage_forward(
    weights: CoverageWeights, coverage: Tensor, attention: Tensor, state: Tensor | None
) -> Tensor:
    """Computes the coverage after a step.

    Args:
        weights: Weights.
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
    _, z, n, _ = _gru(read, recurrent)
    return torch.lerp(n, coverage, z)


def _gru(read: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes r, z, n and the candidate's part of the recurrent product, (B, S, W) each."""
    (ru, zu, nu), (rv, zv, nv) = read.chunk(3, -1), recurrent.chunk(3, -1)
    r = torch.sigmoid(ru + rv)
    return r, torch.sigmoid(zu + zv), torch.tanh(nu + r * nv), nv


class CoverageGradients(NamedTuple):
    """Gradients of a step: those of the arguments, and those of the weights, None where there is no weight."""

    coverage: Tensor
    attention: Tensor
    state: Tensor | None
    shares: Tensor
    weight: Tensor | None
    recurrent: Tensor | None


def coverage_backward(
    weights: CoverageWeights,
    before: Tensor,
    after: Tensor,
    attention: Tensor,
    state: Tensor | None,
    dafter: Tensor,
) -> CoverageGradients:
    """Computes the gradients of :func:`coverage_forward`, given its result and the gradient of that, (B, S, W)."""
    share = attention.unsqueeze(2)
    if weights.attention is None or weights.recurrent is None or state is None:
        dattention = (dafter * weights.shares).sum(2)
        return CoverageGradients(dafter, dattention, None, (dafter * share).sum(2, keepdim=True), None, None)
    if weights.kind == "gru":
        read = weights.shares + weights.attention * share + state.unsqueeze(1)
        r, z, n, v = _gru(read, torch.matmul(before, weights.recurrent.t()))
        dn = dafter * (1.0 - z) * (1.0 - n * n)
        dz = dafter * (before - n) * z * (1.0 - z)
        dr = dn * v * r * (1.0 - r)
        dread, drecurrent, through = torch.cat([dr, dz, dn], 2), torch.cat([dr, dz, dn * r], 2), dafter * z
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
