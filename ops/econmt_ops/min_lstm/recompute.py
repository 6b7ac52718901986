"""MinLSTM that keeps few tensors for the backward pass and recomputes the rest."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import MIN_LSTM
from econmt_ops.layers import scanned

TRAITS = scanned.RECOMPUTE

min_lstm = functools.partial(scanned.recompute, MIN_LSTM)
