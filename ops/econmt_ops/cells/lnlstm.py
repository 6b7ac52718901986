"""LSTM cell with layer normalization (Ba, Kiros and Hinton 2016), over all gates together or gate by gate.

With N(v; g) = g (v - mean v) / sqrt(var v + 1e-5), the products s = W x and v = U h, and the gates i, f, g and o:

    together    a = N(s; g_s) + N(v; g_v) + b                   (equation 20 there; Sockeye's LayerNormLSTMCell)
    per gate    a_k = N(s_k + v_k + b_k; g_k) + shift_k         (Sockeye's LayerNormPerGateLSTMCell)

    c' = sigmoid(a_f) c + sigmoid(a_i) tanh(a_g)        h' = sigmoid(a_o) tanh(N(c'; g_c) + b_c)    (equations 21, 22)

The state c itself is not normalized, only the value from which h is computed. With
y = (v - mean v) / sqrt(var v + 1e-5), backward:

    dv = (dy - mean dy - y mean(dy y)) / sqrt(var v + 1e-5)     dy = dN g       dg = dN y

B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.cells import lstm
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.cells.protocol import Split, StepCell
from econmt_ops.core.weights import AnyLayerNormLSTMWeights, LayerNormLSTMWeights, LayerNormPerGateLSTMWeights


def _standardized(values: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Normalizes each of ``groups`` parts of the rows of (B, N) to mean 0 and variance 1; also returns the factors.

    The factors 1 / sqrt(var + epsilon) are (B, groups, 1).
    """
    parts = values.reshape(*values.shape[:-1], groups, values.shape[-1] // groups)
    centred = parts - parts.mean(-1, keepdim=True)
    factors = torch.rsqrt(centred.square().mean(-1, keepdim=True) + LAYER_NORM_EPSILON)
    return (centred * factors).flatten(-2), factors


def _standardized_back(dvalues: Tensor, normal: Tensor, factors: Tensor) -> Tensor:
    """Computes the gradient of the input of :func:`_standardized`, given its two results."""
    groups = factors.shape[-2]
    d, y = (part.view(*part.shape[:-1], groups, part.shape[-1] // groups) for part in (dvalues, normal))
    result = (d - d.mean(-1, keepdim=True) - y * (d * y).mean(-1, keepdim=True)) * factors
    return result.flatten(-2)


def _shapes_of(weights: type[Any]) -> dict[str, str]:
    others = {"input": "4H I", "hidden": "4H H", "cell_gain": "H", "cell_bias": "H"}
    return {name: others.get(name, "4H") for name in weights._fields}


class LayerNormLSTMCell(StepCell):
    """LSTM with layer normalization as a `econmt_ops.cells.protocol.StepCell`, whose states are h and c.

    The number of tensors in ``extra`` selects the normalization: three gains and two biases (all gates together), or
    two and two (gate by gate).
    """

    name = "lnlstm"
    summary = """Runs a stack of layer-normalized LSTM layers over a batch of sequences (Ba, Kiros and Hinton 2016).

    The equations are those of `lstm` with other sums under the gates: `N(W x_t) + N(U h_{t-1}) + b` for
    `LayerNormLSTMWeights`, or `N_k((W x_t + U h_{t-1} + b)_k)` for each gate k of `LayerNormPerGateLSTMWeights`; and
    `h_t = o tanh(N(c_t))` with the output gate o."""
    states: tuple[str, ...] = ("h", "c")
    weights: type[Any] = LayerNormLSTMWeights
    shapes = _shapes_of(LayerNormLSTMWeights)

    def split(self, weights: AnyLayerNormLSTMWeights) -> Split:
        """See `StepCell`; the bias of a per-gate layer is a part of its product."""
        if isinstance(weights, LayerNormPerGateLSTMWeights):
            return Split(weights.input, weights.hidden, weights.bias, None, tuple(weights[3:]))
        return Split(weights.input, weights.hidden, None, None, tuple(weights[2:]))

    def forward(
        self, read: Tensor, recurrent: Tensor, state: Sequence[Tensor], extra: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """See `StepCell`."""
        c = state[1]
        sums, *_ = _sums(read.to(c.dtype), recurrent.to(c.dtype), extra)
        i, f, g, o = lstm.activate(sums)
        c = f * c + i * g
        normal, _ = _standardized(c, 1)
        return (o * torch.tanh(normal * extra[-2] + extra[-1])).to(read.dtype), c

    def backward(
        self,
        read: Tensor,
        recurrent: Tensor,
        state: Sequence[Tensor],
        after: Sequence[Tensor],
        dafter: Sequence[Tensor],
        extra: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `StepCell`; all of h's gradient flows through the recurrent product."""
        before, c = state[1], after[1]
        dh, dc = dafter[0].to(c.dtype), dafter[1]
        sums, *normalization = _sums(read.to(c.dtype), recurrent.to(c.dtype), extra)
        gates = lstm.activate(sums)
        normal, factors = _standardized(c, 1)
        squashed = torch.tanh(normal * extra[-2] + extra[-1])
        dshown = dh * gates[3] * (1.0 - squashed * squashed)
        total = dc + _standardized_back(dshown * extra[-2], normal, factors)
        dsums = torch.cat(lstm.gate_gradients(gates, before, squashed, dh, total), -1)
        of_cell = ((dshown * normal).sum(0), dshown.sum(0))
        if len(extra) == 4:
            y, scale = normalization
            dread = drecurrent = _standardized_back(dsums * extra[0], y, scale).to(read.dtype)
            of_sums: tuple[Tensor, ...] = (dsums * y).sum(0), dsums.sum(0)
        else:
            y, scale, other, other_scale = normalization
            dread = _standardized_back(dsums * extra[1], y, scale).to(read.dtype)
            drecurrent = _standardized_back(dsums * extra[2], other, other_scale).to(read.dtype)
            of_sums = dsums.sum(0), (dsums * y).sum(0), (dsums * other).sum(0)
        return dread, drecurrent, (torch.zeros_like(dafter[0]), total * gates[1]), (*of_sums, *of_cell)


def _sums(read: Tensor, recurrent: Tensor, extra: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Computes the sums under the gates (B, 4H); also returns the standardized products with their factors."""
    if len(extra) == 4:
        gain, shift = extra[:2]
        y, factors = _standardized(read + recurrent, 4)
        return y * gain + shift, y, factors
    bias, input_gain, hidden_gain = extra[:3]
    y, factors = _standardized(read, 1)
    other, other_factors = _standardized(recurrent, 1)
    return y * input_gain + other * hidden_gain + bias, y, factors, other, other_factors


class LayerNormPerGateLSTMCell(LayerNormLSTMCell):
    """LSTM with the layer normalization of each gate, whose weights are `LayerNormPerGateLSTMWeights`."""

    weights: type[Any] = LayerNormPerGateLSTMWeights
    shapes = _shapes_of(LayerNormPerGateLSTMWeights)


LNLSTM, LNLSTM_PER_GATE = LayerNormLSTMCell(), LayerNormPerGateLSTMCell()
