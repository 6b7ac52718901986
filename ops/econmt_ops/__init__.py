"""Recurrent layers, attention and output layers for PyTorch that train in little memory.

Tensors are batch-first: B batch, T time steps, S source positions, I input size, H hidden size, A attention size,
E value size, V vocabulary. Each function takes ``implementation="auto"`` or a name, and raises ValueError if its
arguments do not fit.
"""

from __future__ import annotations

from econmt_ops.additive_attention import additive_attention
from econmt_ops.attentional_lstm import attentional_lstm
from econmt_ops.cells import scan
from econmt_ops.cells.gru import GRU as GRU_CELL
from econmt_ops.cells.lnlstm import LNLSTM, LNLSTM_PER_GATE
from econmt_ops.core.caches import cache_folder
from econmt_ops.core.weights import (
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    ContextGate,
    Coverage,
    GateWeights,
    GILRLSTMWeights,
    GRUWeights,
    LayerNormLSTMWeights,
    LayerNormPerGateLSTMWeights,
    LowRank,
    LowRankLSTMWeights,
    LSTMState,
    LSTMWeights,
)
from econmt_ops.layers.op import LayerOp
from econmt_ops.linear import linear
from econmt_ops.linear_cross_entropy import linear_cross_entropy
from econmt_ops.linear_recurrence import final_state, linear_recurrence
from econmt_ops.lstm import bidirectional_lstm, lstm
from econmt_ops.modules.attention import AdditiveAttention, AttentionalLSTM, LinearCrossEntropy
from econmt_ops.modules.cells import GILRLSTM, QRNN, SRU, SSRU, LayerNormLSTM
from econmt_ops.modules.rnn import GRU, LSTM
from econmt_ops.products.dropout import dropout_mask
from econmt_ops.products.repeated import UniqueRows

__version__ = "0.1.0"
__all__ = [
    "GILRLSTM",
    "GRU",
    "LSTM",
    "QRNN",
    "SRU",
    "SSRU",
    "AdditiveAttention",
    "AttentionalLSTM",
    "AttentionalLSTMState",
    "AttentionalLSTMWeights",
    "ContextGate",
    "Coverage",
    "GILRLSTMWeights",
    "GRUWeights",
    "GateWeights",
    "LSTMState",
    "LSTMWeights",
    "LayerNormLSTM",
    "LayerNormLSTMWeights",
    "LayerNormPerGateLSTMWeights",
    "LinearCrossEntropy",
    "LowRank",
    "LowRankLSTMWeights",
    "UniqueRows",
    "__version__",
    "additive_attention",
    "attentional_lstm",
    "bidirectional_lstm",
    "dropout_mask",
    "final_state",
    "gilr_lstm",
    "gru",
    "linear",
    "linear_cross_entropy",
    "linear_recurrence",
    "lnlstm",
    "lstm",
    "min_gru",
    "min_lstm",
    "qrnn",
    "sru",
    "ssru",
]

gru = LayerOp(GRU_CELL)
lnlstm = LayerOp(LNLSTM, LNLSTM_PER_GATE, others=("lnglstm",))
sru = LayerOp(scan.SRU)
ssru = LayerOp(scan.SSRU)
qrnn = LayerOp(scan.QRNN, scan.QRNN_OF_TWO, others=("qrnn2",))
gilr_lstm = LayerOp(scan.GILR_LSTM)
min_gru = LayerOp(scan.MIN_GRU)
min_lstm = LayerOp(scan.MIN_LSTM)

# Libraries such as triton ask for a home folder when they are imported, and cannot be imported if there is none.
cache_folder()
