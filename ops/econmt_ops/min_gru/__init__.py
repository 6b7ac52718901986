"""minGRU (Feng et al. 2024)."""

from __future__ import annotations

from econmt_ops.cells.scan import MIN_GRU
from econmt_ops.layers.op import layer_op

min_gru = layer_op(
    __name__,
    """Runs a stack of minGRU layers over a batch of sequences (Feng et al. 2024).

    `u = W x_t + b`, `f = sigmoid(W x_t + b)` and `h_t = c_t = f c_{t-1} + (1 - f) u`, where f is the paper's 1 - z. The
    weights of a layer are `GateWeights(input (2H, I), bias (2H,))` with the rows u, f.""",
    MIN_GRU,
)
