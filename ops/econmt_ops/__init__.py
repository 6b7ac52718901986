"""Memory-saving recurrent, attention and output-layer operations for PyTorch.

Tensors are batch-first: B batch, T time steps, S source positions, H hidden, A attention size, E value size,
V vocabulary. Each function takes `implementation="auto"` or a name, and checks its arguments.
"""

from __future__ import annotations

from econmt_ops.additive_attention import additive_attention
from econmt_ops.attentional_lstm import attentional_lstm
from econmt_ops.core.dropout import dropout_mask
from econmt_ops.core.repeated import Repeated
from econmt_ops.core.weights import (
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    LowRank,
    LowRankLSTMWeights,
    LSTMState,
    LSTMWeights,
)
from econmt_ops.linear import linear
from econmt_ops.linear_cross_entropy import linear_cross_entropy
from econmt_ops.linear_recurrence import final_state, linear_recurrence
from econmt_ops.lstm import bidirectional_lstm, lstm
from econmt_ops.modules import LSTM, AdditiveAttention, AttentionalLSTM, LinearCrossEntropy

__all__ = [
    "LSTM",
    "AdditiveAttention",
    "AttentionalLSTM",
    "AttentionalLSTMState",
    "AttentionalLSTMWeights",
    "LSTMState",
    "LSTMWeights",
    "LinearCrossEntropy",
    "LowRank",
    "LowRankLSTMWeights",
    "Repeated",
    "additive_attention",
    "attentional_lstm",
    "bidirectional_lstm",
    "dropout_mask",
    "final_state",
    "linear",
    "linear_cross_entropy",
    "linear_recurrence",
    "lstm",
]
