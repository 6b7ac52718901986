"""Launches for `compiling`: the kernels of the linear recurrence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from econmt_ops.backends.triton import recurrence
from econmt_ops.core.arguments import RecurrenceArguments


def call(dtype: torch.dtype, options: bool) -> None:
    """Forward and backward of 2 rows of 300 steps of 64 units, with options of 72, which fill no cache line."""
    values = torch.zeros(2, 300, 72 if options else 64, dtype=dtype)
    initial = torch.zeros(2, 72) if options else None
    lengths = torch.zeros(2, dtype=torch.int64) if options else None
    arguments = RecurrenceArguments(values, values, initial, lengths, options, "triton")
    recurrence.forward(arguments)
    recurrence.backward(arguments, values)


def launches() -> dict[str, Callable[[], None]]:
    """Launches by name: of a type, without and with all options of a call."""
    calls = {
        "recurrence float32": (torch.float32, False),
        "recurrence float32 options": (torch.float32, True),
        "recurrence bfloat16": (torch.bfloat16, False),
        "recurrence bfloat16 options": (torch.bfloat16, True),
    }
    return {name: partial(call, *options) for name, options in calls.items()}
