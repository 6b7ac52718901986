"""SRU that keeps few tensors for the backward pass and recomputes the rest."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import SRU
from econmt_ops.layers import scanned

TRAITS = scanned.RECOMPUTE

sru = functools.partial(scanned.recompute, SRU)
