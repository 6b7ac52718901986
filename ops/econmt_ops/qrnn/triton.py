"""The layers of `econmt_ops.qrnn` on a GPU: products, and between them one kernel forward and one back."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import QRNN_OF_TWO
from econmt_ops.layers import fused

TRAITS = fused.TRITON

qrnn = functools.partial(fused.fused, QRNN_OF_TWO)
