"""The layers of `econmt_ops.ssru` on a GPU: products, and between them one kernel forward and one back."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import SSRU
from econmt_ops.layers import fused

TRAITS = fused.TRITON

ssru = functools.partial(fused.fused, SSRU)
