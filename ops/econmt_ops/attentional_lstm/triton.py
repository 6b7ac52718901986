"""The recompute implementation of the attentional LSTM with Triton kernels between its products, for GPUs."""

from __future__ import annotations

import functools

from econmt_ops.attentional_lstm import recompute
from econmt_ops.backends.triton import with_kernels
from econmt_ops.lstm import triton as lstm_triton

TRAITS = with_kernels(recompute.TRAITS, model_stash="attention")

attentional_lstm = functools.partial(recompute.attentional_lstm, backend="triton", run_stack=lstm_triton.lstm)
