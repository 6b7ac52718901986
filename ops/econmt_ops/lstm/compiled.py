"""The recomputing LSTM with its inner steps compiled by torch.compile; see `econmt_ops.lstm.cells`."""

from __future__ import annotations

import functools

from econmt_ops.lstm import recompute

lstm = functools.partial(recompute.lstm, compiled=True)
bidirectional_lstm = functools.partial(recompute.bidirectional_lstm, compiled=True)
