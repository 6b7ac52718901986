"""GRU that keeps few tensors for the backward pass and recomputes the rest."""

from __future__ import annotations

import functools

from econmt_ops.cells.gru import GRU
from econmt_ops.layers import stepped

TRAITS = stepped.RECOMPUTE

gru = functools.partial(stepped.recompute, GRU)
