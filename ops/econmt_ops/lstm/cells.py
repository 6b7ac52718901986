"""What one step of an LSTM computes between its products: in place, or compiled into one pass over memory.

B batch (or the rows of several layers or directions), H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops import steps


def _forward_in_place(gates: Tensor, recurrent: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """One step.

    Args:
        gates: (B, 4H) in the compute type, the share of the inputs and the bias; becomes the sum.
        recurrent: (B, 4H), the share of the h before.
        c: (B, H), the cell state before, in the accumulate type.
        h: (B, H), receives the output, in the compute type.
        after: (B, H), receives the cell state; not ``c`` itself.
    """
    gates += recurrent
    steps.advance_cell(gates.to(c.dtype, copy=True), c, h, after)


def _activated_in_place(gates: Tensor, recurrent: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """As :func:`_forward_in_place` in the accumulate type, but ``gates`` gets their nonlinearities too."""
    gates += recurrent
    steps.advance_cell(gates, c, h, after)


def _backward_in_place(
    gates: Tensor, before: Tensor, c: Tensor, incoming: Tensor, dh: Tensor, dc: Tensor, dgates: Tensor
) -> Tensor:
    """Backward of one step.

    Args:
        gates: (B, 4H) after their nonlinearities, in the accumulate type.
        before: (B, H), the cell state before the step. c: (B, H), after it.
        incoming: (B, H), the gradient of the output, in the compute type.
        dh: (B, H), what the step after adds to it, in the compute type.
        dc: (B, H), the gradient of c, in the accumulate type; overwritten.
        dgates: (B, 4H), receives the gradient of the gates before their nonlinearities.

    Returns:
        The gradient of ``before``, (B, H).
    """
    return steps.retreat_cell(gates, before, c, dh.to(c.dtype) + incoming, dc, dgates)


def _tanh(values: Tensor) -> Tensor:
    # On the CPU the sigmoid costs a third of tanh.
    return 2.0 * torch.sigmoid(2.0 * values) - 1.0


def _forward_pure(gates: Tensor, recurrent: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """As :func:`_forward_in_place`, written for a compiler."""
    total = gates.to(c.dtype) + recurrent.to(c.dtype)
    i, f, g, o = total.chunk(4, 1)
    cell = torch.sigmoid(f) * c + torch.sigmoid(i) * _tanh(g)
    gates.copy_(total)
    after.copy_(cell)
    h.copy_(torch.sigmoid(o) * _tanh(cell))


def _activated_pure(gates: Tensor, recurrent: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """As :func:`_activated_in_place`, written for a compiler."""
    i, f, g, o = (gates + recurrent).chunk(4, 1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), _tanh(g), torch.sigmoid(o)
    cell = f * c + i * g
    gates.copy_(torch.cat((i, f, g, o), 1))
    after.copy_(cell)
    h.copy_(o * _tanh(cell))


def _backward_pure(
    gates: Tensor, before: Tensor, c: Tensor, incoming: Tensor, dh: Tensor, dc: Tensor, dgates: Tensor
) -> Tensor:
    """As :func:`_backward_in_place`, written for a compiler."""
    i, f, g, o = gates.chunk(4, 1)
    squashed, dh = _tanh(c), dh.to(c.dtype) + incoming
    total = dc + dh * o * (1.0 - squashed * squashed)
    parts = (
        total * g * i * (1.0 - i),
        total * before * f * (1.0 - f),
        total * i * (1.0 - g * g),
        dh * squashed * o * (1.0 - o),
    )
    dgates.copy_(torch.cat(parts, 1))
    return total * f


_Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


class Cells(NamedTuple):
    """The step of an LSTM, forward and backward.

    Attributes:
        forward: leaves the gates' sums. activated: leaves the gates after their nonlinearities.
        backward: from gates after their nonlinearities.
    """

    forward: _Forward
    activated: _Forward
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


IN_PLACE = Cells(_forward_in_place, _activated_in_place, _backward_in_place)


@functools.cache
def _compiled() -> Cells:
    # Sizes are constants of the code until one of them changes; then that one becomes a variable.
    pure = (_forward_pure, _activated_pure, _backward_pure)
    return Cells(*(steps.compile_step(function) for function in pure))


def cells(pointwise: str) -> Cells:
    """The step of a schedule's pointwise work; in place where there is no compiler, which is said once."""
    if pointwise == "compiled" and steps.compiled() is not steps.EAGER:
        return _compiled()
    return IN_PLACE
