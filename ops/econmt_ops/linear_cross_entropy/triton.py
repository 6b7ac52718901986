"""The recomputing output layer with one kernel between a chunk's products: of a GPU, and nothing there is waited for.

float64, which the kernels do not compute in, goes PyTorch's way as in "recompute".
"""

from __future__ import annotations

import functools

import torch

from econmt_ops.backends.triton import is_available
from econmt_ops.dispatch.traits import Traits
from econmt_ops.linear_cross_entropy import recompute

TRAITS = Traits(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    recomputes=True,
    has_kernels=True,
    needs="triton",
    is_available=is_available,
)

linear_cross_entropy = functools.partial(recompute.linear_cross_entropy, backend="triton")
