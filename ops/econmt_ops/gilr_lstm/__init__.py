"""LSTM whose gates read a linear surrogate of h (Martin and Cundy 2018)."""

from __future__ import annotations

from econmt_ops.cells.scan import GILR_LSTM
from econmt_ops.layers.op import layer_op

gilr_lstm = layer_op(
    __name__,
    """Runs a stack of GILR-LSTM layers over a batch of sequences (Martin and Cundy 2018, section 3.3).

    `g = sigmoid(U x_t + d)`, `s_t = g s_{t-1} + (1 - g) tanh(U x_t + d)`, then from `W x_t + V s_{t-1} + b` the gates
    `f, i, o = sigmoid(.)` and `z = tanh(.)`, `c_t = f c_{t-1} + i z` and `h_t = o c_t`. The weights of a layer
    are `GILRLSTMWeights(surrogate (2H, I), surrogate_bias, input (4H, I), hidden (4H, H), bias)`. The surrogate's rows
    are its candidate, then g; those of the gates are z, f, i, o.""",
    GILR_LSTM,
)
