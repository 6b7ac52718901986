"""The layers of `econmt_ops.min_lstm` on a GPU: products, and between them one kernel forward and one back."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import MIN_LSTM
from econmt_ops.layers import fused

TRAITS = fused.TRITON

min_lstm = functools.partial(fused.fused, MIN_LSTM)
