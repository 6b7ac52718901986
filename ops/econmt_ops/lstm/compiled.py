"""The recomputing LSTM with its inner steps compiled by torch.compile; see `econmt_ops.backends.compiled`."""

from __future__ import annotations

import functools
from dataclasses import replace

from econmt_ops.lstm import recompute

TRAITS = replace(recompute.TRAITS, warms_up=True, fake_implementation="recompute")

lstm = functools.partial(recompute.lstm, backend="compiled")
bidirectional_lstm = functools.partial(recompute.bidirectional_lstm, backend="compiled")
