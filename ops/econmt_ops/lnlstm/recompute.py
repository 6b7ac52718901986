"""Layer-normalized LSTM that keeps few tensors for the backward pass and recomputes the rest."""

from __future__ import annotations

import functools

from econmt_ops.cells.lnlstm import LNLSTM
from econmt_ops.layers import stepped

TRAITS = stepped.RECOMPUTE

lnlstm = functools.partial(stepped.recompute, LNLSTM)
