"""Launches for `compiling`: the kernels of the linear recurrence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from econmt_ops.backends.triton import recurrence
from econmt_ops.linear_recurrence.scan import RecurrenceArguments, block_of


def call(dtype: torch.dtype, tiled: bool | None, again: bool, options: bool) -> None:
    """Forward and backward of 2 rows of 300 steps of 64 units."""
    values = torch.zeros(2, 300, 64, dtype=dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    initial = torch.zeros(2, 64, dtype=exact) if options else None
    lengths = torch.zeros(2, dtype=torch.int64) if options else None
    block = block_of(300, "triton")
    arguments = RecurrenceArguments(values, values, initial, lengths, options, "outputs", "triton")
    _, carries = recurrence.forward(arguments, block, again, tiled)
    recurrence.backward(arguments, carries, block, values, tiled)


def launches() -> dict[str, Callable[[], None]]:
    """Launches by name: of a type, by tiles or not (None: in Gluon), with outputs made again, and with all options."""
    calls = {
        "gluon float32": (torch.float32, None, False, False),
        "gluon float32 options": (torch.float32, None, False, True),
        "gluon bfloat16": (torch.bfloat16, None, False, False),
        "gluon bfloat16 options": (torch.bfloat16, None, False, True),
        "tiles float32": (torch.float32, True, False, False),
        "walk float32": (torch.float32, False, False, True),
        "tiles bfloat16 again": (torch.bfloat16, True, True, True),
        "walk bfloat16": (torch.bfloat16, False, False, False),
        "walk bfloat16 again": (torch.bfloat16, False, True, True),
        "tiles float64 again": (torch.float64, True, True, False),
    }
    return {name: partial(call, *options) for name, options in calls.items()}
