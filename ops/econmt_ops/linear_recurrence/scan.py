"""The operator of the linear recurrence that the "chunk", "c" and "triton" backends share.

The backward pass is the recurrence in the other direction. It needs the decay and, for the gradient of the decay, the
state before every step: the outputs or, with ``stash`` "carries", the inputs and one state per block of steps, from
which the outputs are recomputed.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.backends import triton
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.registration import Gradients, Incoming, Operator
from econmt_ops.dispatch.traits import Cost
from econmt_ops.linear_recurrence import chunk

STASHES = ("outputs", "carries")
"""Tensors saved for the backward pass beside the decay: the outputs, or the inputs and one state per block of steps."""

_BLOCK = {"c": 64, "triton": 32}
"""Steps of a block by backend; "chunk" uses about sqrt(T)."""


class RecurrenceResults(NamedTuple):
    """Outputs (B, T, H), and the carries, which are empty unless they are saved."""

    outputs: Tensor
    carries: Tensor


def block_of(steps: int, backend: str) -> int:
    """Returns the number of steps of a block; one state per block is saved."""
    return _BLOCK[backend] if backend in _BLOCK else max(16, math.isqrt(steps))


def backend_of(call: RecurrenceArguments) -> ModuleType:
    """Returns the module of a backend: `chunk`, or that of the kernels.

    Its ``forward(call, block, keep)`` returns contiguous outputs, zero at and past a row's length, and the carries if
    ``keep``; its ``backward(call, carries, block, doutputs)`` the gradients of decay, inputs and initial, where without
    carries ``call.inputs`` are the outputs. Tensors (B, T, H) have one type and any strides; ``block`` is what
    `block_of` returns. The content of the carries (B, ceil(T / block), H), in the accumulate type, is private to each.
    """
    if call.backend == "c" and native.serves(call.decay):
        from econmt_ops.backends.c import recurrence as in_c

        return in_c
    if call.backend == "triton" and triton.serves(call.decay) and not triton.interpreted():
        from econmt_ops.backends.triton import recurrence  # imports triton

        return recurrence
    return chunk


def _keeps_carries(call: RecurrenceArguments, keep: bool) -> bool:
    return keep and call.stash == "carries"


def _forward(call: RecurrenceArguments, keep: bool) -> RecurrenceResults:
    block, keeps = block_of(call.inputs.shape[1], call.backend), _keeps_carries(call, keep)
    outputs, carries = backend_of(call).forward(call, block, keeps)
    if carries is None or not keeps:
        carries = outputs.new_empty(0, dtype=accumulate_dtype(outputs.dtype))
    return RecurrenceResults(outputs, carries)


def _empty(call: RecurrenceArguments, keep: bool) -> RecurrenceResults:
    batch, steps, hidden = call.inputs.shape
    blocks = -(-steps // block_of(steps, call.backend))
    shape = (batch, blocks, hidden) if _keeps_carries(call, keep) else (0,)
    carries = call.inputs.new_empty(shape, dtype=accumulate_dtype(call.inputs.dtype))
    return RecurrenceResults(torch.empty_like(call.inputs, memory_format=torch.contiguous_format), carries)


def _backward(call: RecurrenceArguments, results: RecurrenceResults, incoming: Incoming) -> Gradients:
    doutputs = incoming["outputs"]
    assert doutputs is not None
    # Unless the stash is "carries", the outputs stand in for the inputs, which are not saved.
    carries = results.carries if call.stash == "carries" else None
    block = block_of(call.decay.shape[1], call.backend)
    ddecay, dinputs, dinitial = backend_of(call).backward(call, carries, block, doutputs)
    return {"decay": ddecay, "inputs": dinputs, "initial": dinitial}


def _cost(call: RecurrenceArguments, tensors: int, products: int) -> Cost:
    """Returns the cost of a pass.

    The kernels need no workspace. "chunk" makes ``tensors`` copies of shape (B, T, H) in the accumulate type, and two
    more with lengths.
    """
    values = call.decay.numel()
    copies = tensors + (2 if call.lengths is not None else 0) if call.backend == "chunk" else 0
    return Cost(copies * values * accumulate_dtype(call.decay.dtype).itemsize, 2 * products * values)


COSTS = {
    "econmt_ops::linear_recurrence": lambda *arguments: _cost(RecurrenceArguments(*arguments[:-1]), 0, 1),
    "econmt_ops::linear_recurrence_backward": lambda *arguments: _cost(
        RecurrenceArguments(*arguments[2 * len(RecurrenceResults._fields) :]), 2, 2
    ),
}
"""Costs of the operator's two passes, for the traits of its implementations."""

_operator = Operator(
    "econmt_ops::linear_recurrence",
    RecurrenceArguments,
    RecurrenceResults,
    forward=_forward,
    fake=_empty,
    backward=_backward,
    saves=lambda call: (
        *("decay", "initial", "lengths"),
        *(("inputs", "carries") if call.stash == "carries" else ("outputs",)),
    ),
    stand_ins={"inputs": "outputs"},
)


def linear_recurrence(call: RecurrenceArguments, *, backend: str) -> Tensor:
    """Implements `econmt_ops.linear_recurrence` for checked and cast arguments."""
    return _operator(call._replace(backend=backend)).outputs
