"""QRNN that keeps few tensors for the backward pass and recomputes the rest."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import QRNN_OF_TWO
from econmt_ops.layers import scanned

TRAITS = scanned.RECOMPUTE

qrnn = functools.partial(scanned.recompute, QRNN_OF_TWO)
