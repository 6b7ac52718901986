"""The layers of `econmt_ops.min_lstm` with little kept and the rest made again."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import MIN_LSTM
from econmt_ops.layers import scanned

TRAITS = scanned.RECOMPUTE

min_lstm = functools.partial(scanned.recompute, MIN_LSTM)
