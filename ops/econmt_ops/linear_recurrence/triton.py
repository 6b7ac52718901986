"""The linear recurrence in Triton kernels on a GPU, in one pass over memory, for all floating point types."""

from __future__ import annotations

import functools

from econmt_ops.backends.triton import with_kernels
from econmt_ops.dispatch.traits import FLOATS, Traits
from econmt_ops.linear_recurrence import scan

TRAITS = with_kernels(Traits(recomputes=True, costs=scan.COSTS), dtypes=FLOATS)

linear_recurrence = functools.partial(scan.linear_recurrence, backend="triton")
