"""The recomputing layers of `econmt_ops.gru` on a GPU: of each step a product and one kernel, each way."""

from __future__ import annotations

import functools

from econmt_ops.backends.triton import with_kernels
from econmt_ops.gru import recompute

TRAITS = with_kernels(recompute.TRAITS)

gru = functools.partial(recompute.gru, backend="triton")
