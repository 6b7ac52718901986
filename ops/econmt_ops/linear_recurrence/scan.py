"""The operator of the linear recurrence that the "chunk", "c" and "triton" backends share.

The backward pass is the recurrence in the other direction. It needs the decay and, for the gradient of the decay, the
state before every step: the outputs.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from torch import Tensor, contiguous_format, empty_like

from econmt_ops.backends import c as native
from econmt_ops.backends import triton
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.registration import Gradients, Incoming, Operator
from econmt_ops.dispatch.traits import Cost
from econmt_ops.linear_recurrence import chunk


class RecurrenceResults(NamedTuple):
    """Outputs (B, T, H)."""

    outputs: Tensor


def backend_of(call: RecurrenceArguments) -> ModuleType:
    """Returns the module of a backend: `chunk`, or that of the kernels.

    Its ``forward(call)`` returns contiguous outputs, zero at and past a row's length; its ``backward(call, doutputs)``
    the gradients of decay, inputs and initial, where ``call.inputs`` are the outputs. Tensors (B, T, H) have one type
    and any strides.
    """
    if call.backend == "c" and native.serves(call.decay):
        from econmt_ops.backends.c import recurrence as in_c

        return in_c
    if call.backend == "triton" and triton.serves(call.decay) and not triton.interpreted():
        from econmt_ops.backends.triton import recurrence  # imports triton

        return recurrence
    return chunk


def _forward(call: RecurrenceArguments, keep: bool) -> RecurrenceResults:  # noqa: ARG001 - the outputs are all there is
    return RecurrenceResults(backend_of(call).forward(call))


def _empty(call: RecurrenceArguments, keep: bool) -> RecurrenceResults:  # noqa: ARG001
    return RecurrenceResults(empty_like(call.inputs, memory_format=contiguous_format))


def _backward(call: RecurrenceArguments, results: RecurrenceResults, incoming: Incoming) -> Gradients:  # noqa: ARG001
    ddecay, dinputs, dinitial = backend_of(call).backward(call, incoming["outputs"])
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
    saves=lambda _: ("decay", "initial", "lengths", "outputs"),
    stand_ins={"inputs": "outputs"},  # which are not saved
)


def linear_recurrence(call: RecurrenceArguments, *, backend: str) -> Tensor:
    """Implements `econmt_ops.linear_recurrence` for checked and cast arguments."""
    return _operator(call._replace(backend=backend)).outputs
