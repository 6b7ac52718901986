"""Output of a decoder step from the shares of the stack's output and of the context.

Without a gate the argument of tanh is x = share + context, of H numbers each. With one (Tu et al. 2017, section 3.2)
both have 2H, those of the gate first:

    z = sigmoid(share_z + context_z)        x = z share_x + (1 - z) (context_x + bias)
    o = tanh(N(x)), where N is a layer normalisation with gain and bias, or x itself

    dn = do (1 - o^2)       dx: `torch.native_layer_norm`'s       d share_x = dx z      d context_x = dx (1 - z)
    d share_z = d context_z = dx (share_x - context_x - bias) z (1 - z)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.cells.attention import LAYER_NORM_EPSILON

Norm = tuple[Tensor, Tensor]
"""Gain (H,) and bias (H,) of a layer normalisation."""


def combined(share: Tensor, context: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x (..., H) from share and context, (..., H) each, or (..., 2H) with the gate's ``bias`` (H,)."""
    if bias is None:
        return share + context
    (share_z, share_x), (context_z, context_x) = share.chunk(2, -1), context.chunk(2, -1)
    return torch.lerp(context_x + bias, share_x, torch.sigmoid(share_z + context_z))


def output_forward(share: Tensor, context: Tensor, bias: Tensor | None, norm: Norm | None) -> Tensor:
    """Computes o (..., H); arguments as in :func:`combined`, all of one type."""
    x = combined(share, context, bias)
    if norm is not None:
        x = functional.layer_norm(x, x.shape[-1:], *norm, LAYER_NORM_EPSILON)
    return torch.tanh(x)


class OutputGradients(NamedTuple):
    """Gradients of share, context, and of gain and shift (H,), summed over the rows; None without a normalisation."""

    share: Tensor
    context: Tensor
    norm: Norm | None


def output_backward(
    share: Tensor, context: Tensor, output: Tensor, doutput: Tensor, bias: Tensor | None, norm: Norm | None
) -> OutputGradients:
    """Computes the gradients of :func:`output_forward` for rows (B, .), given o (B, H) and its gradient."""
    dx = torch.addcmul(doutput, doutput * output, output, value=-1)
    dnorm = None
    if norm is not None:
        x = combined(share, context, bias)
        _, mean, scale = torch.native_layer_norm(x, [x.shape[-1]], *norm, LAYER_NORM_EPSILON)
        dx, *sums = torch.ops.aten.native_layer_norm_backward(
            dx, x, [x.shape[-1]], mean, scale, *norm, [True, True, True]
        )
        dnorm = sums[0], sums[1]
    if bias is None:
        return OutputGradients(dx, dx, dnorm)
    (share_z, share_x), (context_z, context_x) = share.chunk(2, -1), context.chunk(2, -1)
    z = torch.sigmoid(share_z + context_z)
    dz = dx * (share_x - context_x - bias) * z * (1.0 - z)
    return OutputGradients(torch.cat([dz, dx * z], -1), torch.cat([dz, dx * (1.0 - z)], -1), dnorm)
