"""SSRU in plain PyTorch: the definition that other implementations are tested against."""

from __future__ import annotations

import functools

from econmt_ops.cells.scan import SSRU
from econmt_ops.layers import scanned

TRAITS = scanned.REFERENCE

ssru = functools.partial(scanned.reference, SSRU)
