"""Simple recurrent unit (Lei, Zhang and Artzi 2017)."""

from __future__ import annotations

from econmt_ops.cells.scan import SRU
from econmt_ops.layers.op import layer_op

sru = layer_op(
    __name__,
    """Runs a stack of SRU layers over a batch of sequences (Lei, Zhang and Artzi 2017).

    `u = W x_t`, `f, r = sigmoid(W x_t + b)`, `c_t = f c_{t-1} + (1 - f) u` and `h_t = r tanh c_t + (1 - r) x_t`. The
    weights of a layer are `GateWeights(input (3H, I), bias (3H,))` with the rows u, f, r. If I is not H they are
    (4H, I) and (4H,); the last H rows project x_t to H values for h_t.""",
    SRU,
)
