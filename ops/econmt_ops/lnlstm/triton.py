"""Layer-normalized LSTM as `recompute` on a GPU: a product and one kernel per step, forward and backward."""

from __future__ import annotations

import functools

from econmt_ops.backends.triton import with_kernels
from econmt_ops.lnlstm import recompute

TRAITS = with_kernels(recompute.TRAITS)

lnlstm = functools.partial(recompute.lnlstm, backend="triton")
