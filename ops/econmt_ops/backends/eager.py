"""The steps in PyTorch's operators, on any device: in place, with one workspace for all steps of a call.

The mathematics is that of `econmt_ops.cells.lstm`. Gates in the accumulate type are kept after their nonlinearities,
where nothing is lost by it; gates in 16 bits are kept as sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.attention import EagerAttention
from econmt_ops.backends.protocol import AttentionKernels, Read
from econmt_ops.cells.protocol import StepCell
from econmt_ops.core.activations import tanh_
from econmt_ops.core.loops import steps_of
from econmt_ops.core.precision import accumulate_dtype

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
"""dy y (1 - y), from dy and y."""
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
"""dy (1 - y^2), from dy and y."""


def activate_(sums: Tensor) -> Tensor:
    """The gates (..., 4H) of sums, in place; tanh x is 2 sigmoid(2 x) - 1, which a CPU makes in a third of the time."""
    g = sums.chunk(4, -1)[2]
    g.add_(g)
    sums.sigmoid_()
    g.mul_(2).sub_(1)
    return sums


def advance_cell(sums: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """One step of an LSTM cell without a workspace.

    Args:
        sums: (B, 4H) in the accumulate type, overwritten.
        c: (B, H), the cell state before.
        h: (B, H), is written. after: (B, H), gets the cell state after the step; may be ``c``.
    """
    i, f, g, o = activate_(sums).chunk(4, 1)
    torch.mul(f, c, out=after)
    after.addcmul_(i, g)
    torch.mul(tanh_(after.clone()), o, out=h)


def give_read(h: Tensor, read: Read | None) -> None:
    """Writes what the layer above reads of a step's h (B, H)."""
    if read is None:
        return
    values = h if read.residual is None else h + read.residual
    if read.keep is not None:
        values = torch.where(read.keep, values * read.scale, 0.0)
    for destination in read.destinations:
        destination.copy_(values)


def through_dropout(dh: Sequence[Tensor], keep: Tensor | None, scale: float) -> Sequence[Tensor]:
    """Gradients of h (B, H), of which the first is one of what dropout left of it."""
    return dh if keep is None else (torch.where(keep, dh[0] * scale, 0.0), *dh[1:])


class _Workspace:
    """Memory for a step that is kept from one step to the next.

    Memory taken anew for each step would have been written by nobody and lie in no cache.

    Attributes:
        gates: (B, 4H) in the accumulate type, and ``quarters``, its four gates. made: the same for their gradients.
        squashed, dh, total: (B, H).
    """

    def __init__(self, c: Tensor) -> None:
        """``c``: (B, H), in the accumulate type, as the cell states of the steps."""
        rows, hidden = c.shape
        self.gates = c.new_empty(rows, 4 * hidden)
        self.quarters = self.gates.chunk(4, 1)
        # Zeros, since a quarter is multiplied before it is first written, and odd values can be slow to multiply.
        self.made = c.new_zeros(rows, 4 * hidden)
        self.made_quarters = self.made.chunk(4, 1)
        self.squashed, self.dh, self.other, self.total = c.new_empty(4, rows, hidden).unbind(0)
        self._minus_one = torch.full((), -1.0, dtype=c.dtype)

    def fits(self, c: Tensor) -> bool:
        """Whether it is for steps with cell states like ``c``."""
        mine = self.total
        return mine.shape == c.shape and mine.dtype == c.dtype and mine.device == c.device

    def activate(self, gates: Tensor, quarters: Sequence[Tensor]) -> None:
        """The nonlinearities of gates (B, 4H), in place."""
        g = quarters[2]
        g.add_(g)
        gates.sigmoid_()
        self._stretch_(g)

    def _stretch_(self, values: Tensor) -> Tensor:
        """2 x - 1, in place and in one pass, which a number in the first place would not allow."""
        return torch.add(self._minus_one, values, alpha=2, out=values)

    def squash(self, c: Tensor) -> Tensor:
        """tanh c, (B, H), until the next step."""
        if c.device.type != "cpu":
            return torch.tanh(c, out=self.squashed)
        return self._stretch_(torch.add(c, c, out=self.squashed).sigmoid_())

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of one or two (B, H) tensors, in the accumulate type, until the next step."""
        first, *others = parts
        if first.dtype != self.dh.dtype:
            # Given two types, an operator would make copies of its own.
            first, others = self.dh.copy_(first), [self.other.copy_(other) for other in others]
        return torch.add(first, others[0], out=self.dh) if others else first


class CellSteps:
    """The steps of cells of which a backend knows no more than their mathematics."""

    def step_forward(
        self,
        cell: StepCell,
        read: Tensor,
        recurrent: Tensor,
        state: Sequence[Tensor],
        extra: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """See `StepCell.forward`."""
        return cell.forward(read, recurrent, state, extra)

    def step_backward(
        self,
        cell: StepCell,
        read: Tensor,
        recurrent: Tensor,
        state: Sequence[Tensor],
        after: Sequence[Tensor],
        dafter: Sequence[Tensor],
        extra: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """See `StepCell.backward`."""
        return cell.backward(read, recurrent, state, after, dafter, extra)

    def step_forward_into(
        self,
        cell: StepCell,
        read: Tensor,
        recurrent: Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        output: Tensor,
        extra: Sequence[Tensor],
        padding: Tensor | None,
    ) -> None:
        """See `StepKernels`."""
        made = self.step_forward(cell, read, recurrent, before, extra)
        mask = None if padding is None else padding.unsqueeze(1)
        output.copy_(made[0] if mask is None else torch.where(mask, 0.0, made[0]))
        for place, old, new in zip(after, before, made, strict=True):
            place.copy_(new if mask is None else torch.where(mask, old, new))

    def rows_of_sums(self, batch: int) -> int:  # noqa: ARG002 - they are summed
        """See `StepKernels`."""
        return 1

    def step_backward_into(
        self,
        cell: StepCell,
        read: Tensor,
        recurrent: Tensor,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        dstate: Sequence[Tensor],
        given: Tensor | None,
        extra: Sequence[Tensor],
        padding: Tensor | None,
        dread: Tensor,
        drecurrent: Tensor,
        dextra: Sequence[Tensor],
    ) -> None:
        """See `StepKernels`."""
        mask = None if padding is None else padding.unsqueeze(1)
        dafter = tuple(dstate) if given is None else (dstate[0] + given, *dstate[1:])
        if mask is not None:  # nothing of the step reaches what is carried, which passes it by
            dafter = tuple(torch.where(mask, 0.0, part) for part in dafter)
        of_read, of_recurrent, made, parts = self.step_backward(
            cell, read, recurrent, before, after, dafter, extra
        )
        dread.copy_(of_read)
        drecurrent.copy_(of_recurrent)
        for place, new in zip(dstate, made, strict=True):
            place.copy_(new if mask is None else torch.where(mask, place, new))
        for total, part in zip(dextra, parts, strict=True):
            total += part


class EagerSteps(CellSteps):
    """`econmt_ops.backends.protocol.StepKernels` by PyTorch's operators."""

    def __init__(self, like: Tensor) -> None:
        """``like``: a tensor of the call's compute type on its device."""
        self.dtype, self.accumulate = like.dtype, accumulate_dtype(like.dtype)
        self._room: _Workspace | None = None

    def _workspace(self, c: Tensor) -> _Workspace:
        if self._room is None or not self._room.fits(c):
            self._room = _Workspace(c)
        return self._room

    def cell_forward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        h: Sequence[Tensor],
        *,
        keep: bool,
        recurrent: Tensor | None = None,
        read: Read | None = None,
    ) -> None:
        """See `StepKernels`."""
        self._advance(gates, recurrent, before, after, h[0], keep)
        for other in h[1:]:
            other.copy_(h[0])
        give_read(h[0], read)

    def _advance(
        self,
        gates: Tensor,
        recurrent: Tensor | None,
        before: Tensor,
        after: Tensor,
        h: Tensor,
        keep: bool,  # noqa: ARG002 - kept either way
    ) -> None:
        """The step itself; what it writes is described in `StepKernels`."""
        if recurrent is not None:
            gates.add_(recurrent)
        room = self._workspace(before)
        if gates.dtype == before.dtype:
            quarters: Sequence[Tensor] = gates.chunk(4, 1)
        else:
            gates, quarters = room.gates.copy_(gates), room.quarters
        room.activate(gates, quarters)
        i, f, g, o = quarters
        torch.mul(f, before, out=after)
        after.addcmul_(i, g)
        torch.mul(room.squash(after), o, out=h)

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """See `StepKernels`."""
        return activate_(gates if gates.dtype == self.accumulate else gates.to(self.accumulate))

    def scan_cells(self, gates: Tensor, first: Tensor) -> Tensor:
        """See `StepKernels`."""
        if gates.dtype != first.dtype:
            gates = activate_(gates.to(first.dtype))
        i, f, g, _ = gates.chunk(4, 2)
        cells = first.new_empty(len(gates) + 1, *first.shape)
        cells[0] = first
        torch.mul(i, g, out=cells[1:])
        for step in steps_of(range(len(gates))):
            cells[step + 1].addcmul_(f[step], cells[step])
        return cells

    def cell_backward(
        self,
        gates: Tensor,
        before: Tensor,
        after: Tensor,
        dh: Sequence[Tensor],
        dc: Tensor,
        dgates: Tensor,
        *,
        keep: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """See `StepKernels`."""
        dh = through_dropout(dh, keep, scale)
        room = self._workspace(dc)
        if gates.dtype == dc.dtype:
            i, f, g, o = gates.chunk(4, 1)
        else:
            gates = room.gates.copy_(gates)
            room.activate(gates, room.quarters)
            i, f, g, o = room.quarters
        given = room.add(dh)
        squashed, (di, df, dg, do) = room.squash(after), room.made_quarters
        total = torch.mul(given, o, out=room.total)
        _tanh_backward(total, squashed, grad_input=total)
        total.add_(dc)
        # Times x (1 - x) for the gate x, or 1 - x^2 for g, these are the gradients.
        torch.mul(total, g, out=di)
        torch.mul(total, before, out=df)
        torch.mul(given, squashed, out=do)
        of_g = torch.mul(total, i, out=squashed)
        torch.mul(total, f, out=dc)
        at_once = dgates.dtype == dc.dtype and not dgates.is_set_to(gates)
        made = dgates if at_once else room.made
        _sigmoid_backward(room.made, gates, grad_input=made)
        _tanh_backward(of_g, g, grad_input=made.chunk(4, 1)[2] if at_once else dg)
        if not at_once:
            dgates.copy_(made)

    def attention(
        self,
        keys: Tensor,
        projected: Tensor,
        score: Tensor | None,
        norm: tuple[Tensor, Tensor] | None,
        scale: float,
        lengths: Tensor | None,
    ) -> AttentionKernels:
        """See `StepKernels`."""
        return EagerAttention(keys, projected, score, norm, scale, lengths)
