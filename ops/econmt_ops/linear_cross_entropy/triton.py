"""The recompute implementation of the output layer with one Triton kernel between the products of a chunk.

No step synchronises with the GPU. float64 inputs, which the kernels do not support, use the PyTorch operators of
"recompute".
"""

from __future__ import annotations

import functools

from econmt_ops.backends.triton import with_kernels
from econmt_ops.linear_cross_entropy import recompute

TRAITS = with_kernels(recompute.TRAITS)

linear_cross_entropy = functools.partial(recompute.linear_cross_entropy, backend="triton")
