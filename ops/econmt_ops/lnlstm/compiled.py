"""Layer-normalized LSTM as `recompute` with each step's pointwise work compiled; see `econmt_ops.backends.compiled`."""

from __future__ import annotations

import functools
from dataclasses import replace

from econmt_ops.lnlstm import recompute

TRAITS = replace(recompute.TRAITS, warms_up=True, fake_implementation="recompute")

lnlstm = functools.partial(recompute.lnlstm, backend="compiled")
