"""Quasi-recurrent network with fo-pooling (Bradbury et al. 2017)."""

from __future__ import annotations

from econmt_ops.cells.scan import QRNN, QRNN_OF_TWO
from econmt_ops.layers.op import layer_op

qrnn = layer_op(
    __name__,
    """Runs a stack of QRNN layers with fo-pooling over a batch of sequences (Bradbury et al. 2017).

    `z = tanh(W x_t + V x_{t-1} + b)`, `f, o = sigmoid(W x_t + V x_{t-1} + b)`, `c_t = f c_{t-1} + (1 - f) z` and
    `h_t = o c_t`. The weights of a layer are `GateWeights(input (3H, 2I), bias (3H,))` with the rows z, f, o and the
    columns of W before those of V; an input weight (3H, I) selects a window of one step, without V. With a window of
    two steps the states are c and x (B, I), the last input.""",
    QRNN,
    QRNN_OF_TWO,
)
