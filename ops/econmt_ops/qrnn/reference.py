"""QRNN in plain PyTorch: the definition that other implementations are tested against."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import QRNN_OF_TWO
from econmt_ops.layers import scanned

TRAITS = scanned.REFERENCE

qrnn = functools.partial(scanned.reference, QRNN_OF_TWO)
