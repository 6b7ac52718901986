"""`LSTM` and `GRU` with the arguments, parameters, results and errors of `torch.nn.LSTM` and `torch.nn.GRU`."""

from __future__ import annotations

from econmt_ops.rnn.modules import GRU, LSTM

__all__ = ["GRU", "LSTM"]
