"""The LSTM with layer normalisation (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

from econmt_ops.cells.lnlstm import LNLSTM, LNLSTM_PER_GATE
from econmt_ops.layers.op import layer_op

lnlstm = layer_op(
    __name__,
    """Runs a stack of LSTM layers with layer normalisation over a batch of sequences (Ba, Kiros and Hinton 2016).

    As `lstm`, with the gates' sums `N(W x_t) + N(U h_{t-1}) + b` of `LayerNormLSTMWeights`, or
    `N_k((W x_t + U h_{t-1} + b)_k)` gate by gate of `LayerNormPerGateLSTMWeights`, and `h_t = u tanh(N(c_t))`.""",
    LNLSTM,
    LNLSTM_PER_GATE,
)
