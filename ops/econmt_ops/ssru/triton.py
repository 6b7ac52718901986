"""SSRU on a GPU: matrix products, and one kernel between them, forward and backward."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import SSRU
from econmt_ops.layers import fused

TRAITS = fused.TRITON

ssru = functools.partial(fused.fused, SSRU)
