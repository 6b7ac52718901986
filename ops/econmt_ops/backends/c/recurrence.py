"""The linear recurrence in the C library: a backend of `econmt_ops.linear_recurrence.scan`.

A task is a range of columns of a row, with all of its steps, so that memory is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.c import call
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.shapes import Shapes

_LINE = 16
"""Columns of a task are a multiple of this: a cache line of float32."""

_WIDEST = 2048
"""Maximum columns of a task, so that its states stay in the L1 cache."""


def _sizes(decay: Tensor, reverse: bool) -> dict[str, int]:
    """Returns the fields that the structures of both passes have; tasks are as few as keep all threads busy."""
    rows, steps, hidden = decay.shape
    threads = torch.get_num_threads()
    parts = 1 if rows % threads == 0 or rows >= 4 * threads else threads
    width = min(_WIDEST, max(_LINE, -(-hidden // (parts * _LINE)) * _LINE))
    return {"rows": rows, "positions": steps, "hidden": hidden, "width": width, "backwards": reverse}


def forward(step: RecurrenceArguments, outputs: Tensor | None = None) -> Tensor:
    """Returns the outputs, in given memory or in new; see `econmt_ops.linear_recurrence.scan.backend_of`."""
    if step.lengths is not None:
        # torch.compile leaves the check of the op out, and the kernel writes by them.
        Shapes("linear_recurrence").bounded("lengths", step.lengths, step.decay.shape[1])
    if outputs is None:
        outputs = torch.empty_like(step.decay, memory_format=torch.contiguous_format)
    call(
        "recurrence_forward",
        3 * step.decay.numel(),
        **_sizes(step.decay, step.reverse),
        decay=step.decay,
        inputs=step.inputs,
        initial=step.initial,
        lengths=step.lengths,
        outputs=outputs,
    )
    return outputs


def backward(
    step: RecurrenceArguments, doutputs: Tensor, made: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of decay and inputs, in given memory or in new, and that of initial; see `forward`."""
    rows, _, hidden = step.decay.shape
    ddecay, dinputs = made or [
        torch.empty_like(step.decay, memory_format=torch.contiguous_format) for _ in range(2)
    ]
    dinitial = torch.empty(rows, hidden, dtype=torch.float32, device="cpu")
    call(
        "recurrence_backward",
        5 * step.decay.numel(),
        **_sizes(step.decay, step.reverse),
        decay=step.decay,
        kept=step.inputs,
        doutputs=doutputs,
        initial=step.initial,
        lengths=step.lengths,
        ddecay=ddecay,
        dinputs=dinputs,
        gradients_batch=ddecay.stride(0),
        gradients_step=ddecay.stride(1),
        dinitial=dinitial,
    )
    return ddecay, dinputs, dinitial
