"""Simpler simple recurrent unit (Kim et al. 2019)."""

from __future__ import annotations

from econmt_ops.cells.scan import SSRU
from econmt_ops.layers.op import layer_op

ssru = layer_op(
    __name__,
    """Runs a stack of SSRU layers over a batch of sequences (Kim et al. 2019).

    `u = W x_t`, `f = sigmoid(W x_t + b)`, `c_t = f c_{t-1} + (1 - f) u` and `h_t = max(c_t, 0)`. The weights of a
    layer are `GateWeights(input (2H, I), bias (2H,))` with the rows u, f.""",
    SSRU,
)
