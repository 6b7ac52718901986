"""The layers of `econmt_ops.lnlstm` in plain PyTorch, the definition."""

from __future__ import annotations

import functools

from econmt_ops.cells.lnlstm import LNLSTM
from econmt_ops.layers import stepped

TRAITS = stepped.REFERENCE

lnlstm = functools.partial(stepped.reference, LNLSTM)
