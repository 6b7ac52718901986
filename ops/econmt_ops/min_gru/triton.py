"""The layers of `econmt_ops.min_gru` on a GPU: products, and between them one kernel forward and one back."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import MIN_GRU
from econmt_ops.layers import fused

TRAITS = fused.TRITON

min_gru = functools.partial(fused.fused, MIN_GRU)
