"""The layers of `econmt_ops.sru` with little kept and the rest made again."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import SRU
from econmt_ops.layers import scanned

TRAITS = scanned.RECOMPUTE

sru = functools.partial(scanned.recompute, SRU)
