"""The recompute implementation of the LSTM, with its steps compiled by torch.compile."""

from __future__ import annotations

import functools
from dataclasses import replace

from econmt_ops.lstm import recompute

TRAITS = replace(recompute.TRAITS, warms_up=True, fake_implementation="recompute")

lstm = functools.partial(recompute.lstm, backend="compiled")
bidirectional_lstm = functools.partial(recompute.bidirectional_lstm, backend="compiled")
