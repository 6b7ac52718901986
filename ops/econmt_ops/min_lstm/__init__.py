"""minLSTM (Feng et al. 2024)."""

from __future__ import annotations

from econmt_ops.cells.scan import MIN_LSTM
from econmt_ops.layers.op import layer_op

min_lstm = layer_op(
    __name__,
    """Runs a stack of minLSTM layers over a batch of sequences (Feng et al. 2024).

    `u = W x_t + b`, `f, i = sigmoid(W x_t + b)` and `h_t = c_t = (f c_{t-1} + i u) / (f + i)`. The weights of
    a layer are `GateWeights(input (3H, I), bias (3H,))` with the rows u, f, i.""",
    MIN_LSTM,
)
