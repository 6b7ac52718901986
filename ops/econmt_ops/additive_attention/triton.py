"""The recomputing additive attention on a GPU, with our Triton kernels between its products."""

from __future__ import annotations

import functools

import torch

from econmt_ops.additive_attention import recompute
from econmt_ops.backends.triton import is_available
from econmt_ops.dispatch.traits import Traits

TRAITS = Traits(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    recomputes=True,
    has_kernels=True,
    needs="triton",
    is_available=is_available,
)

additive_attention = functools.partial(recompute.additive_attention, backend="triton")
