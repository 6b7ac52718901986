"""The linear recurrence in the C library, for float32 and bfloat16 on the CPU, in one pass over memory."""

from __future__ import annotations

import functools

import torch

from econmt_ops.backends import c as native
from econmt_ops.dispatch.traits import Traits
from econmt_ops.linear_recurrence import scan

TRAITS = Traits(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    recomputes=True,
    has_kernels=True,
    is_available=native.is_installed,
    costs=scan.COSTS,
)

linear_recurrence = functools.partial(scan.linear_recurrence, backend="c")
