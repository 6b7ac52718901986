"""The recomputing output layer with one kernel between a chunk's products: of a GPU, and nothing there is waited for.

float64, which the kernels do not compute in, goes PyTorch's way as in "recompute".
"""

from __future__ import annotations

import functools

from econmt_ops.backends.triton import with_kernels
from econmt_ops.linear_cross_entropy import recompute

TRAITS = with_kernels(recompute.TRAITS)

linear_cross_entropy = functools.partial(recompute.linear_cross_entropy, backend="triton")
