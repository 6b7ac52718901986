"""GILR-LSTM in plain PyTorch: the definition that other implementations are tested against."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import GILR_LSTM
from econmt_ops.layers import scanned

TRAITS = scanned.REFERENCE

gilr_lstm = functools.partial(scanned.reference, GILR_LSTM)
