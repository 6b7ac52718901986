"""Gated recurrent unit (Cho et al. 2014)."""

from __future__ import annotations

from econmt_ops.cells.gru import GRU
from econmt_ops.layers.op import layer_op

gru = layer_op(
    __name__,
    """Runs a stack of GRU layers, as `torch.nn.GRU`, over a batch of sequences (Cho et al. 2014).

    With `s = W x_t + b` and `v = U h_{t-1} + b'`: `r, z = sigmoid(s + v)`, `n = tanh(s + r v)` and
    `h_t = (1 - z) n + z h_{t-1}`. The weights of a layer are `GRUWeights` with the rows r, z, n. h is stored in the
    compute type between steps.""",
    GRU,
)
