"""GRU cell of `torch.nn.GRU` and cuDNN: r multiplies the recurrent product, its bias included.

Cho et al. 2014, "Learning phrase representations using RNN encoder-decoder", with reset and product in the order of
Chung et al. 2014. With the products s = W x + b and v = U h + b', whose thirds belong to r, z and n:

    r, z = sigmoid(s + v)       n = tanh(s_n + r v_n)       h' = (1 - z) n + z h

    dn = dh' (1 - z) (1 - n^2)      dz = dh' (h - n) z (1 - z)      dr = dn v_n r (1 - r)
    ds = [dr, dz, dn]               dv = [dr, dz, dn r]             dh = dh' z + dv U

B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.cells.protocol import Split, StepCell
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import GRUWeights


class GRUCell(StepCell):
    """GRU as a `econmt_ops.cells.protocol.StepCell`, whose only state is h."""

    name = "gru"
    summary = """Runs a stack of GRU layers, as `torch.nn.GRU`, over a batch of sequences (Cho et al. 2014).

    With `s = W x_t + b` and `v = U h_{t-1} + b'`: `r, z = sigmoid(s + v)`, `n = tanh(s + r v)` and
    `h_t = (1 - z) n + z h_{t-1}`. The weights of a layer are `GRUWeights` with the rows r, z, n. h is stored in the
    compute type between steps."""
    states: tuple[str, ...] = ("h",)
    weights: type[Any] = GRUWeights
    shapes = {"input": "3H I", "hidden": "3H H", "bias": "3H", "hidden_bias": "3H"}  # noqa: RUF012

    def split(self, weights: GRUWeights) -> Split:
        """See `StepCell`."""
        return Split(weights.input, weights.hidden, weights.bias, weights.hidden_bias, ())

    def forward(
        self,
        read: Tensor,
        recurrent: Tensor,
        state: Sequence[Tensor],
        extra: Sequence[Tensor] = (),  # noqa: ARG002 - the cell has none
    ) -> tuple[Tensor, ...]:
        """See `StepCell`."""
        h = state[0].to(accumulate_dtype(read.dtype))
        _, z, n, _ = _activate(read.to(h.dtype), recurrent.to(h.dtype))
        return (torch.lerp(n, h, z).to(read.dtype),)

    def backward(
        self,
        read: Tensor,
        recurrent: Tensor,
        state: Sequence[Tensor],
        after: Sequence[Tensor],  # noqa: ARG002 - recomputed instead
        dafter: Sequence[Tensor],
        extra: Sequence[Tensor] = (),  # noqa: ARG002 - the cell has none
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `StepCell`."""
        exact = accumulate_dtype(read.dtype)
        h, dh = state[0].to(exact), dafter[0].to(exact)
        r, z, n, v = _activate(read.to(exact), recurrent.to(exact))
        dn = dh * (1.0 - z) * (1.0 - n * n)
        dz = dh * (h - n) * z * (1.0 - z)
        dr = dn * v * r * (1.0 - r)
        dread = torch.cat([dr, dz, dn], -1).to(read.dtype)
        drecurrent = torch.cat([dr, dz, dn * r], -1).to(read.dtype)
        return dread, drecurrent, ((dh * z).to(dafter[0].dtype),), ()


def _activate(read: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes r, z, n and the candidate's part of the recurrent product, (B, H) each."""
    hidden = read.shape[-1] // 3
    r, z = torch.sigmoid(read[..., : 2 * hidden] + recurrent[..., : 2 * hidden]).chunk(2, -1)
    share = recurrent[..., 2 * hidden :]
    return r, z, torch.tanh(torch.addcmul(read[..., 2 * hidden :], r, share)), share


GRU = GRUCell()
