"""GILR-LSTM that keeps few tensors for the backward pass and recomputes the rest."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import GILR_LSTM
from econmt_ops.layers import scanned

TRAITS = scanned.RECOMPUTE

gilr_lstm = functools.partial(scanned.recompute, GILR_LSTM)
