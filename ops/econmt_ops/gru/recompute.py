"""The layers of `econmt_ops.gru` with little kept and the rest made again."""

from __future__ import annotations

import functools

from econmt_ops.cells.gru import GRU
from econmt_ops.layers import stepped

TRAITS = stepped.RECOMPUTE

gru = functools.partial(stepped.recompute, GRU)
