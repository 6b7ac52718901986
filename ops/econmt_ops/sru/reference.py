"""SRU in plain PyTorch: the definition that other implementations are tested against."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import SRU
from econmt_ops.layers import scanned

TRAITS = scanned.REFERENCE

sru = functools.partial(scanned.reference, SRU)
