"""MinLSTM on a GPU: matrix products, and one kernel between them, forward and backward."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import MIN_LSTM
from econmt_ops.layers import fused

TRAITS = fused.TRITON

min_lstm = functools.partial(fused.fused, MIN_LSTM)
