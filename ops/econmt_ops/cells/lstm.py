"""LSTM cell: the equations that all backends implement.

Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000. With the sums s = W x + U h + b, whose
quarters belong to the gates i, f, g and o:

    i, f, o = sigmoid(s)    g = tanh(s)         c' = f c + i g          h' = o tanh(c')

    dc' += dh' o (1 - tanh^2 c')                dc = dc' f
    di = dc' g i (1 - i)    df = dc' c f (1 - f)    dg = dc' i (1 - g^2)    do = dh' tanh(c') o (1 - o)

B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.cells.protocol import Cell, Split
from econmt_ops.core.weights import AnyLSTMWeights, LSTMWeights

Pointwise = Callable[[Tensor], Tensor]


def activate(sums: Tensor, tanh: Pointwise = torch.tanh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gates i, f, g and o, (..., H) each, from their sums (..., 4H), with the given tanh."""
    i, f, g, o = sums.chunk(4, -1)
    return torch.sigmoid(i), torch.sigmoid(f), tanh(g), torch.sigmoid(o)


def update_state(gates: Sequence[Tensor], c: Tensor, tanh: Pointwise = torch.tanh) -> tuple[Tensor, Tensor]:
    """Computes h and c after a step, (B, H) each, from the gates i, f, g, o and the c before, (B, H) each."""
    i, f, g, o = gates
    c = f * c + i * g
    return o * tanh(c), c


def update_state_backward(
    gates: Sequence[Tensor],
    before: Tensor,
    after: Tensor,
    dh: Tensor,
    dc: Tensor,
    tanh: Pointwise = torch.tanh,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Computes the gradients of the four quarters of the sums and of c before the step, (B, H) each.

    Takes the gates i, f, g and o, c before and after the step and the gradients of h and c after it, (B, H) each.
    """
    squashed = tanh(after)
    total = dc + dh * gates[3] * (1.0 - squashed * squashed)
    return gate_gradients(gates, before, squashed, dh, total), total * gates[1]


def gate_gradients(
    gates: Sequence[Tensor], before: Tensor, squashed: Tensor, dh: Tensor, dc: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of the four quarters of the sums, (B, H) each.

    ``squashed`` is what the output gate multiplies, and ``dc`` the whole gradient of c after the step.
    """
    i, f, g, o = gates
    return (
        dc * g * i * (1.0 - i),
        dc * before * f * (1.0 - f),
        dc * i * (1.0 - g * g),
        dh * squashed * o * (1.0 - o),
    )


def forward(sums: Tensor, c: Tensor, tanh: Pointwise = torch.tanh) -> tuple[Tensor, Tensor]:
    """Computes h in the compute type and c in the accumulate type, (B, H) each, after a step.

    Takes the sums (B, 4H) in the compute type and c before the step in the accumulate type, in which all is computed.
    """
    h, c = update_state(activate(sums.to(c.dtype), tanh), c, tanh)
    return h.to(sums.dtype), c


class LSTMCell(Cell):
    """LSTM as a `econmt_ops.cells.protocol.Cell`, whose states are h and c; its layers run in ways of their own."""

    name = "lstm"
    summary = "See `econmt_ops.lstm`."
    states: tuple[str, ...] = ("h", "c")
    weights: type[Any] = LSTMWeights
    shapes = {"input": "4H I", "hidden": "4H H", "bias": "4H"}  # noqa: RUF012

    def split(self, weights: AnyLSTMWeights) -> Split:
        """See `econmt_ops.cells.protocol.StepCell`; one product gives all gates."""
        return Split(weights.input, weights.hidden, weights.bias, None, ())


LSTM = LSTMCell()
