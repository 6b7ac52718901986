"""The recomputing layers of `econmt_ops.lnlstm` on a GPU: of each step a product and one kernel, each way."""

from __future__ import annotations

import functools

from econmt_ops.backends.triton import with_kernels
from econmt_ops.lnlstm import recompute

TRAITS = with_kernels(recompute.TRAITS)

lnlstm = functools.partial(recompute.lnlstm, backend="triton")
