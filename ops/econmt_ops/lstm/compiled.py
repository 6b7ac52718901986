"""The recomputing LSTM with its inner steps compiled by torch.compile; see `econmt_ops.backends.compiled`."""

from __future__ import annotations

import functools

from econmt_ops.lstm import recompute

lstm = functools.partial(recompute.lstm, backend="compiled")
bidirectional_lstm = functools.partial(recompute.bidirectional_lstm, backend="compiled")
