"""GILR-LSTM on a GPU: matrix products, and one kernel between them, forward and backward."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import GILR_LSTM
from econmt_ops.layers import fused

TRAITS = fused.TRITON

gilr_lstm = functools.partial(fused.fused, GILR_LSTM)
