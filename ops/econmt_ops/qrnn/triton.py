"""QRNN on a GPU: matrix products, and one kernel between them, forward and backward."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import QRNN_OF_TWO
from econmt_ops.layers import fused

TRAITS = fused.TRITON

qrnn = functools.partial(fused.fused, QRNN_OF_TWO)
