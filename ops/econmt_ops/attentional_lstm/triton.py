"""The recomputing attentional LSTM on a GPU, with our Triton kernels between its products."""

from __future__ import annotations

import functools

from econmt_ops.attentional_lstm import recompute
from econmt_ops.backends.triton import is_available

__all__ = ["attentional_lstm", "is_available"]

attentional_lstm = functools.partial(recompute.attentional_lstm, backend="triton")
