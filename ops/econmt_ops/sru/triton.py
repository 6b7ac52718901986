"""The layers of `econmt_ops.sru` on a GPU: products, and between them one kernel forward and one back."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import SRU
from econmt_ops.layers import fused

TRAITS = fused.TRITON

sru = functools.partial(fused.fused, SRU)
