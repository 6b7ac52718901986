"""The layers of `econmt_ops.ssru` with little kept and the rest made again."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import SSRU
from econmt_ops.layers import scanned

TRAITS = scanned.RECOMPUTE

ssru = functools.partial(scanned.recompute, SSRU)
