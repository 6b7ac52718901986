"""What one step of an LSTM computes between its products: in place, or compiled into one pass over memory.

B batch (or the rows of several layers or directions), H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.backends import steps


class _InPlace:
    """The steps of one call, with one workspace for all."""

    def __init__(self) -> None:
        self._room: steps.Workspace | None = None

    def _workspace(self, c: Tensor) -> steps.Workspace:
        room = self._room
        if room is None or not room.fits(c):
            self._room = room = steps.Workspace(c)
        return room

    def forward(self, gates: Tensor, recurrent: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
        """One step.

        Args:
            gates: (B, 4H) in the compute type, the share of the inputs and the bias; becomes the sum.
            recurrent: (B, 4H), the share of the h before.
            c: (B, H), the cell state before, in the accumulate type.
            h: (B, H), receives the output, in the compute type.
            after: (B, H), receives the cell state; not ``c`` itself.
        """
        if native.serves(gates):
            native.lstm_forward(gates, recurrent, c, h, after, None)
            return
        room = self._workspace(c)
        room.gates.copy_(gates.add_(recurrent))
        room.advance(c, h, after)

    def activated(self, gates: Tensor, recurrent: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
        """As :meth:`forward` in the accumulate type, but ``gates`` gets their nonlinearities too."""
        if native.serves(gates):
            native.lstm_forward(gates, recurrent, c, h, after, gates)
            return
        self._workspace(c).advance(c, h, after, gates.add_(recurrent))

    def backward(
        self,
        gates: Tensor,
        before: Tensor,
        c: Tensor,
        incoming: Tensor,
        dh: Tensor,
        dc: Tensor,
        dgates: Tensor,
    ) -> Tensor:
        """Backward of one step.

        Args:
            gates: (B, 4H) after their nonlinearities, in the accumulate type.
            before: (B, H), the cell state before the step. c: (B, H), after it.
            incoming: (B, H), the gradient of the output, in the compute type.
            dh: (B, H), what the step after adds to it, in the compute type.
            dc: (B, H), the gradient of c, in the accumulate type.
            dgates: (B, 4H), receives the gradient of the gates before their nonlinearities.

        Returns:
            The gradient of ``before``, (B, H).
        """
        if native.serves(dgates):
            return native.lstm_backward(gates, False, before, c, incoming, dh, dc, dgates)
        return self._workspace(c).retreat(before, c, incoming, dh, dc, dgates, gates)

    def backward_of_sums(
        self,
        gates: Tensor,
        before: Tensor,
        c: Tensor,
        incoming: Tensor,
        dh: Tensor,
        dc: Tensor,
        dgates: Tensor,
    ) -> Tensor:
        """As :meth:`backward`, but from gates before their nonlinearities, in the compute type."""
        if native.serves(dgates):
            return native.lstm_backward(gates, True, before, c, incoming, dh, dc, dgates)
        room = self._workspace(c)
        room.gates.copy_(gates)
        room.activate()
        return room.retreat(before, c, incoming, dh, dc, dgates)


def _tanh(values: Tensor) -> Tensor:
    # On the CPU the sigmoid costs a third of tanh.
    return 2.0 * torch.sigmoid(2.0 * values) - 1.0


def _forward_pure(gates: Tensor, recurrent: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """As :meth:`_InPlace.forward`, written for a compiler."""
    total = gates.to(c.dtype) + recurrent.to(c.dtype)
    i, f, g, o = total.chunk(4, 1)
    cell = torch.sigmoid(f) * c + torch.sigmoid(i) * _tanh(g)
    gates.copy_(total)
    after.copy_(cell)
    h.copy_(torch.sigmoid(o) * _tanh(cell))


def _activated_pure(gates: Tensor, recurrent: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """As :meth:`_InPlace.activated`, written for a compiler."""
    i, f, g, o = (gates + recurrent).chunk(4, 1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), _tanh(g), torch.sigmoid(o)
    cell = f * c + i * g
    gates.copy_(torch.cat((i, f, g, o), 1))
    after.copy_(cell)
    h.copy_(o * _tanh(cell))


def _backward_pure(
    gates: Tensor, before: Tensor, c: Tensor, incoming: Tensor, dh: Tensor, dc: Tensor, dgates: Tensor
) -> Tensor:
    """As :meth:`_InPlace.backward`, written for a compiler."""
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


def _backward_of_sums_pure(
    gates: Tensor, before: Tensor, c: Tensor, incoming: Tensor, dh: Tensor, dc: Tensor, dgates: Tensor
) -> Tensor:
    """As :meth:`_InPlace.backward_of_sums`, written for a compiler."""
    i, f, g, o = gates.to(c.dtype).chunk(4, 1)
    activated = torch.cat((torch.sigmoid(i), torch.sigmoid(f), _tanh(g), torch.sigmoid(o)), 1)
    return _backward_pure(activated, before, c, incoming, dh, dc, dgates)


_Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
_Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Cells(NamedTuple):
    """The step of an LSTM, forward and backward.

    Attributes:
        forward: leaves the gates' sums. activated: leaves the gates after their nonlinearities.
        backward: from gates after their nonlinearities. backward_of_sums: from what ``forward`` left.
    """

    forward: _Forward
    activated: _Forward
    backward: _Backward
    backward_of_sums: _Backward


@functools.cache
def _compiled() -> Cells:
    # Sizes are constants of the code until one of them changes; then that one becomes a variable.
    pure = (_forward_pure, _activated_pure, _backward_pure, _backward_of_sums_pure)
    return Cells(*(steps.compile_step(function) for function in pure))


def cells(pointwise: str) -> Cells:
    """The step of a schedule's pointwise work, for one call; in place without a compiler, which is said once."""
    if pointwise == "compiled" and steps.compiled() is not steps.EAGER:
        return _compiled()
    made = _InPlace()
    return Cells(made.forward, made.activated, made.backward, made.backward_of_sums)
