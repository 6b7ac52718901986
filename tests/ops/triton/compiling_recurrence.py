"""As `compiling`, the kernels of the linear recurrence.

``python -m tests.ops.triton.compiling_recurrence CAPABILITY NAME...``, with names of `calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from econmt_ops.backends.triton import recurrence
from econmt_ops.core.arguments import RecurrenceArguments
from tests.ops.triton.compiling import report


def calls() -> dict[str, tuple[torch.dtype, bool | None, bool]]:
    """By name: type, whether by tiles (None: in Gluon), and all options of a call."""
    return {
        "gluon float32": (torch.float32, None, False),
        "gluon float32 options": (torch.float32, None, True),
        "gluon bfloat16": (torch.bfloat16, None, False),
        "gluon bfloat16 options": (torch.bfloat16, None, True),
        "tiles float32": (torch.float32, True, False),
        "walk float32": (torch.float32, False, True),
        "tiles bfloat16": (torch.bfloat16, True, True),
        "walk bfloat16": (torch.bfloat16, False, False),
        "tiles float64": (torch.float64, True, False),
    }


def call(dtype: torch.dtype, tiled: bool | None, options: bool) -> None:
    """Forward and backward of 2 rows of 300 steps of 64 units."""
    values = torch.zeros(2, 300, 64, dtype=dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    initial = torch.zeros(2, 64, dtype=exact) if options else None
    lengths = torch.zeros(2, dtype=torch.int64) if options else None
    arguments = RecurrenceArguments(values, values, initial, lengths, options, "triton")
    recurrence.forward(arguments, tiled)
    recurrence.backward(arguments, values, tiled)


def launches() -> dict[str, Callable[[], None]]:
    """Launches by name."""
    return {name: partial(call, *options) for name, options in calls().items()}


if __name__ == "__main__":
    report(launches())
