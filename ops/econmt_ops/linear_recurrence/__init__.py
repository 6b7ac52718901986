"""The linear recurrence h_t = decay_t h_{t-1} + inputs_t."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.backends.triton import on_kernels
from econmt_ops.core.arguments import RecurrenceArguments
from econmt_ops.core.precision import accumulate_dtype, explicit_casts
from econmt_ops.core.shapes import Shapes, check_tensor
from econmt_ops.dispatch.select import Candidate, Problem, run
from econmt_ops.dispatch.traits import FLOATS, Traits, implementations
from econmt_ops.linear_recurrence import reference, scan
from econmt_ops.products.stack import last_of

_SCAN = Traits(recomputes=True, costs=scan.COSTS)
_IN_C = replace(
    _SCAN,
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    has_kernels=True,
    is_available=native.is_installed,
)
implementations(
    "linear_recurrence",
    reference,
    chunk=(functools.partial(scan.linear_recurrence, backend="chunk"), _SCAN),
    c=(functools.partial(scan.linear_recurrence, backend="c"), _IN_C),
    triton=on_kernels(scan.linear_recurrence, _SCAN, dtypes=FLOATS),
)


def linear_recurrence(
    decay: Tensor,
    inputs: Tensor,
    *,
    initial: Tensor | None = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Computes `h_t = decay_t h_{t-1} + inputs_t` for every row and unit (Martin and Cundy 2018).

    Args:
        decay: (B, T, H), any numbers. Axes along which it is constant may have size 1; (H,) is accepted too.
        inputs: (B, T, H).
        initial: h before the first step, (B, H); zeros if None.
        lengths: (B,) int64, the steps of each row, from 0 to T; None: all rows have T. Positions at or past a row's
            length give zeros, get no gradient and do not influence anything.
        reverse: True to run from a row's last position to its first, `h_t = decay_t h_{t+1} + inputs_t`, starting from
            `initial` after the last position.
        implementation: "auto" or the name of an implementation.

    Returns:
        h, (B, T, H), in the type of `inputs`, accumulated in float32, or in float64 for float64. Autocast has no
        effect, because there is no matrix product. `final_state` returns the state after the last step.

    Raises:
        ValueError: shapes or types do not fit, or the implementation is unknown.
    """
    check = Shapes("linear_recurrence")
    check("inputs", inputs, "B T H")
    check.not_empty("inputs", inputs)
    check_tensor(check.op, "decay", decay)
    check("decay", spread_decay(decay, inputs), "B T H")
    if initial is not None:
        check("initial", initial, "B H")
    check.lengths(lengths, "T")
    exact = accumulate_dtype(inputs.dtype)

    def call(candidate: Candidate, inputs: Tensor, decay: Tensor, initial: Tensor | None) -> Tensor:
        with explicit_casts(inputs):
            outputs: Tensor = candidate.function(
                RecurrenceArguments(
                    spread_decay(decay.to(inputs.dtype), inputs),
                    inputs,
                    None if initial is None else initial.to(exact),
                    None if lengths is None else lengths.to(inputs.device, non_blocking=True),
                    reverse,
                )
            )
        return outputs

    detail = " ".join(["reverse"] * reverse + ["lengths"] * (lengths is not None))
    problem = Problem("linear_recurrence", (inputs, decay, initial), inputs.dtype, check.sizes, detail)
    return run(problem, call, implementation)


def spread_decay(decay: Tensor, inputs: Tensor) -> Tensor:
    """Expands a decay of shape (H,), or with axes of size 1, to a view of the shape (B, T, H) of ``inputs``."""
    target = inputs.shape
    if decay.dim() not in (1, 3) or len(target) != 3:
        return decay
    fits = all(axis in (1, size) for axis, size in zip(decay.shape[::-1], target[::-1], strict=False))
    return decay.expand(target) if fits and (decay.dim() == 3 or decay.shape[0] == target[2]) else decay


def final_state(
    outputs: Tensor, *, lengths: Tensor | None = None, reverse: bool = False, initial: Tensor | None = None
) -> Tensor:
    """Returns the state (B, H) after the last step of `linear_recurrence`, from its outputs and arguments.

    The state is the output at the row's last position, or at its first one with ``reverse``; rows of length 0 return
    ``initial``. It has the type of ``outputs``.
    """
    first = outputs.new_zeros(()) if initial is None else initial.to(outputs.dtype)
    if reverse:
        outputs = outputs[:, :1]
        lengths = None if lengths is None else lengths.clamp(max=1)
    return last_of(outputs, first, lengths)
