"""The layers of `econmt_ops.lnlstm` with little kept and the rest made again."""

from __future__ import annotations

import functools

from econmt_ops.cells.lnlstm import LNLSTM
from econmt_ops.layers import stepped

TRAITS = stepped.RECOMPUTE

lnlstm = functools.partial(stepped.recompute, LNLSTM)
