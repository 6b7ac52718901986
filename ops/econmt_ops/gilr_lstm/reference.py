"""The layers of `econmt_ops.gilr_lstm` in plain PyTorch, the definition."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import GILR_LSTM
from econmt_ops.layers import scanned

TRAITS = scanned.REFERENCE

gilr_lstm = functools.partial(scanned.reference, GILR_LSTM)
