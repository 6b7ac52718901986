"""The recompute implementation of the attentional LSTM, with its steps compiled by torch.compile."""

from __future__ import annotations

import functools
from dataclasses import replace

from econmt_ops.attentional_lstm import recompute

TRAITS = replace(recompute.TRAITS, warms_up=True, fake_implementation="recompute")

attentional_lstm = functools.partial(recompute.attentional_lstm, backend="compiled")
