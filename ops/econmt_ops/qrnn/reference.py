"""The layers of `econmt_ops.qrnn` in plain PyTorch, the definition."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import QRNN_OF_TWO
from econmt_ops.layers import scanned

TRAITS = scanned.REFERENCE

qrnn = functools.partial(scanned.reference, QRNN_OF_TWO)
