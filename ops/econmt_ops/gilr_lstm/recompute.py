"""The layers of `econmt_ops.gilr_lstm` with little kept and the rest made again."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import GILR_LSTM
from econmt_ops.layers import scanned

TRAITS = scanned.RECOMPUTE

gilr_lstm = functools.partial(scanned.recompute, GILR_LSTM)
