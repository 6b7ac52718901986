"""The recompute implementation of additive attention with Triton kernels between its matrix products, for GPUs."""

from __future__ import annotations

import functools

from econmt_ops.additive_attention import recompute
from econmt_ops.backends.triton import with_kernels

TRAITS = with_kernels(recompute.TRAITS)

additive_attention = functools.partial(recompute.additive_attention, backend="triton")
