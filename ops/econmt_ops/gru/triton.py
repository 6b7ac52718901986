"""GRU as `recompute` on a GPU: a product and one kernel per step, forward and backward."""

from __future__ import annotations

import functools

from econmt_ops.backends.triton import with_kernels
from econmt_ops.gru import recompute

TRAITS = with_kernels(recompute.TRAITS)

gru = functools.partial(recompute.gru, backend="triton")
