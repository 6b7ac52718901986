"""The recomputing attentional LSTM with its inner steps compiled by torch.compile."""

from __future__ import annotations

import functools

from econmt_ops.attentional_lstm import recompute

attentional_lstm = functools.partial(recompute.attentional_lstm, backend="compiled")
