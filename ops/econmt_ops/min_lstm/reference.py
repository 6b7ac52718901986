"""MinLSTM in plain PyTorch: the definition that other implementations are tested against."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import MIN_LSTM
from econmt_ops.layers import scanned

TRAITS = scanned.REFERENCE

min_lstm = functools.partial(scanned.reference, MIN_LSTM)
