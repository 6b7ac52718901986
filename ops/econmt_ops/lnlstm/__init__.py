"""LSTM with layer normalization (Ba, Kiros and Hinton 2016)."""

from __future__ import annotations

from econmt_ops.cells.lnlstm import LNLSTM, LNLSTM_PER_GATE
from econmt_ops.layers.op import layer_op

lnlstm = layer_op(
    __name__,
    """Runs a stack of LSTM layers with layer normalization over a batch of sequences (Ba, Kiros and Hinton 2016).

    The equations are those of `lstm` with other sums under the gates: `N(W x_t) + N(U h_{t-1}) + b` for
    `LayerNormLSTMWeights`, or `N_k((W x_t + U h_{t-1} + b)_k)` for each gate k of `LayerNormPerGateLSTMWeights`; and
    `h_t = o tanh(N(c_t))` with the output gate o.""",
    LNLSTM,
    LNLSTM_PER_GATE,
)
