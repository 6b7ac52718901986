"""Layer-normalized LSTM in plain PyTorch: the definition that other implementations are tested against."""

from __future__ import annotations

import functools

from econmt_ops.cells.lnlstm import LNLSTM
from econmt_ops.layers import stepped

TRAITS = stepped.REFERENCE

lnlstm = functools.partial(stepped.reference, LNLSTM)
