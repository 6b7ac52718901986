"""Steps in PyTorch operators, on any device.

The equations are those of `econmt_ops.cells.lstm`. Gates in the accumulate type are kept after their nonlinearities,
without loss of precision; 16-bit gates are kept as sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.attention import EagerAttention
from econmt_ops.backends.c.attention import CAttention
from econmt_ops.backends.covered_attention import CoveredAttention
from econmt_ops.backends.protocol import AttentionInputs, CellStep, OutputStep, Read, StepGradients
from econmt_ops.cells import lstm
from econmt_ops.cells.output import output_backward, output_forward
from econmt_ops.core.activations import tanh_
from econmt_ops.core.loops import steps_of
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import Coverage


def activate_(sums: Tensor) -> Tensor:
    """Applies the gates' nonlinearities to sums (..., 4H) in place; tanh x = 2 sigmoid(2 x) - 1 is faster on CPUs."""
    g = sums.chunk(4, -1)[2]
    g.add_(g)
    sums.sigmoid_()
    g.mul_(2).sub_(1)
    return sums


def advance_cell(sums: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """Runs one step of an LSTM cell without a workspace.

    Args:
        sums: (B, 4H) in the accumulate type, overwritten.
        c: (B, H), the cell state before.
        h: (B, H), is written. after: (B, H), receives the cell state after the step; may be ``c``.
    """
    i, f, g, o = activate_(sums).chunk(4, 1)
    torch.mul(f, c, out=after)
    after.addcmul_(i, g)
    torch.mul(tanh_(after.clone()), o, out=h)


def tanh(values: Tensor) -> Tensor:
    """Computes tanh by the sigmoid, which takes a CPU a third of the time."""
    return 2.0 * torch.sigmoid(2.0 * values) - 1.0


def fill_quarters(gates: Tensor, quarters: Sequence[Tensor]) -> None:
    """Writes the quarters of (B, 4H) separately, so that a compiler does not materialise their concatenation."""
    for destination, quarter in zip(gates.chunk(4, 1), quarters, strict=True):
        destination.copy_(quarter)


def lstm_forward(
    gates: Tensor, recurrent: Tensor | None, before: Tensor, after: Tensor, h: Tensor, keep: bool
) -> None:
    """Runs one step of an LSTM cell; the arguments are those of `EagerSteps.cell_forward`."""
    sums = gates.to(before.dtype)
    if recurrent is not None:
        sums = sums + recurrent.to(before.dtype)
    activated = lstm.activate(sums, tanh)
    new_h, c = lstm.update_state(activated, before, tanh)
    if keep:
        fill_quarters(gates, activated if gates.dtype == before.dtype else sums.chunk(4, 1))
    after.copy_(c)
    h.copy_(new_h)


def lstm_backward(
    gates: Tensor, before: Tensor, after: Tensor, dh: Tensor, other: Tensor | None, dc: Tensor, dgates: Tensor
) -> None:
    """Runs one step backward; the arguments are those of `EagerSteps.cell_backward`, dropout applied."""
    exact = dc.dtype
    activated = gates.chunk(4, 1) if gates.dtype == exact else lstm.activate(gates.to(exact), tanh)
    total_dh = dh.to(exact) if other is None else dh.to(exact) + other.to(exact)
    parts, dbefore = lstm.update_state_backward(activated, before, after, total_dh, dc, tanh)
    fill_quarters(dgates, parts)
    dc.copy_(dbefore)


def give_read(h: Tensor, read: Read | None) -> None:
    """Writes the next layer's input: h (B, H) of a step, plus the residual, after dropout."""
    if read is None:
        return
    values = h if read.residual is None else h + read.residual
    if read.keep is not None:
        values = torch.where(read.keep, values * read.scale, 0.0)
    for destination in read.destinations:
        destination.copy_(values)


class EagerSteps:
    """Pointwise work and reductions of a call's steps in PyTorch operators; other backends override its methods."""

    _lstm_forward: Callable[..., None] = staticmethod(lstm_forward)
    _lstm_backward: Callable[..., None] = staticmethod(lstm_backward)

    def __init__(self, like: Tensor) -> None:
        """Takes a tensor of the call's compute type on its device."""
        self.dtype, self.accumulate = like.dtype, accumulate_dtype(like.dtype)

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of a step."""
        return function(*arguments)

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
        """Runs one step of an LSTM cell.

        Args:
            gates: (B, 4H), the sums before their nonlinearities, in the compute type and the order i, f, g, o. May be
                overwritten; with ``keep`` they are left in the form that `cell_backward` reads.
            before: (B, H), the cell state, in the accumulate type. after: (B, H) is written, may be ``before``.
            h: (B, H) tensors, at least one, that receive the new h in the compute type.
            keep: True if a backward pass will read these gates.
            recurrent: (B, 4H) in the compute type, to be added to ``gates``; or None.
                `econmt_ops.products.gemm.Product.share` returns it where a library cannot add to ``gates`` itself.
            read: input of the next layer at this step; or None.
        """
        after = before if after.is_set_to(before) else after
        self._run(self._lstm_forward, gates, recurrent, before, after, h[0], keep)
        for other in h[1:]:
            other.copy_(h[0])
        give_read(h[0], read)

    def step_forward_into(
        self, step: CellStep, after: Sequence[Tensor], output: Tensor, read: Read | None = None
    ) -> None:
        """Runs one step of any cell.

        Args:
            step: Arguments of the step.
            after: (B, H) each, receive the states after the step; may be the states before it.
            output: (B, H) is written: h, zero at padded rows.
            read: Input of the next layer at this step; or None.
        """
        self._step_forward(step, after, output)
        give_read(output, read)

    def _step_forward(self, step: CellStep, after: Sequence[Tensor], output: Tensor) -> None:
        """Runs the step itself; see `step_forward_into`."""
        states = self._run(step.cell.forward, step.read, step.recurrent, step.before, step.extra)
        mask = None if step.padding is None else step.padding.unsqueeze(1)
        output.copy_(states[0] if mask is None else torch.where(mask, 0.0, states[0]))
        for destination, old, new in zip(after, step.before, states, strict=True):
            destination.copy_(new if mask is None else torch.where(mask, old, new))

    def rows_of_sums(self, batch: int) -> int:  # noqa: ARG002 - gradients are summed over the batch
        """Returns R, the number of rows over which `step_backward_into` spreads the gradients of a cell's vectors."""
        return 1

    def step_backward_into(
        self,
        step: CellStep,
        after: Sequence[Tensor],
        dstate: Sequence[Tensor],
        doutput: Tensor | None,
        gradients: StepGradients,
        *,
        flow: Tensor | None = None,
        keep: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """Runs the backward pass of one step of any cell, see `StepCell.backward`.

        Args:
            step: Arguments of the step.
            after: States as written by `step_forward_into`.
            dstate: Gradients of ``after``; overwritten by those of the states before the step, without the part that
                flows through the recurrent product.
            doutput: (B, H), the gradient of the step's output; or None.
            gradients: Tensors that receive the gradients.
            flow: (B, H), another gradient of h after the step; or None.
            keep, scale: As in `Read`, applied to ``doutput``, a gradient of the output after dropout.
        """
        if keep is not None and doutput is not None:
            doutput = torch.where(keep, doutput * scale, 0.0)
        if flow is not None:
            doutput = flow if doutput is None else doutput + flow
        self._step_backward(step, after, dstate, doutput, gradients)

    def _step_backward(
        self,
        step: CellStep,
        after: Sequence[Tensor],
        dstate: Sequence[Tensor],
        doutput: Tensor | None,
        gradients: StepGradients,
    ) -> None:
        """Runs the backward pass of the step itself; see `step_backward_into`."""
        mask = None if step.padding is None else step.padding.unsqueeze(1)
        dafter = tuple(dstate) if doutput is None else (dstate[0] + doutput, *dstate[1:])
        if mask is not None:  # a padded row's state bypasses the step
            dafter = tuple(torch.where(mask, 0.0, part) for part in dafter)
        dread, drecurrent, dbefore, parts = self._run(
            step.cell.backward, step.read, step.recurrent, step.before, after, dafter, step.extra
        )
        gradients.read.copy_(dread)
        gradients.recurrent.copy_(drecurrent)
        for destination, new in zip(dstate, dbefore, strict=True):
            destination.copy_(new if mask is None else torch.where(mask, destination, new))
        for total, part in zip(gradients.extra, parts, strict=True):
            total += part

    def prepare_gates(self, gates: Tensor) -> Tensor:
        """Converts a block's recomputed sums (K, B, 4H) to the form that `cell_backward` reads; may overwrite them."""
        return activate_(gates if gates.dtype == self.accumulate else gates.to(self.accumulate))

    def scan_cells(self, gates: Tensor, first: Tensor) -> Tensor:
        """Returns the cell states (K + 1, B, H) of a block, ``first`` (B, H) and one per step, in the accumulate type.

        Args:
            gates: (K, B, 4H) as returned by `prepare_gates`, or as left by `cell_forward`.
        """
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
        """Runs the backward pass of one step of an LSTM cell.

        Args:
            gates: (B, 4H) as left by `cell_forward`. before, after: (B, H), the cell states around the step.
            dh: (B, H), one or two gradients of h in the compute type, which are added.
            dc: (B, H) in the accumulate type, the gradient of ``after``; overwritten by that of ``before``.
            dgates: (B, 4H) is written in the compute type: the gradient of the sums; may be ``gates``.
            keep, scale: as in `Read`, applied to the first of ``dh``, a gradient of h after dropout.
        """
        if keep is not None:
            dh = torch.where(keep, dh[0] * scale, 0.0), *dh[1:]
        first, other = (*dh, None)[:2]
        dgates = gates if dgates.is_set_to(gates) else dgates
        self._run(self._lstm_backward, gates, before, after, first, other, dc, dgates)

    def attention(self, inputs: AttentionInputs, coverage: Coverage | None = None) -> EagerAttention:
        """Returns the attention kernels of this call; the weights of a coverage have the accumulate type."""
        attention = (CAttention if library.serves(inputs.keys) else EagerAttention)(inputs)
        return attention if coverage is None else CoveredAttention(attention, inputs, coverage)

    def output_forward(self, step: OutputStep, outputs: Sequence[Tensor]) -> None:
        """Computes the output of a step; ``outputs`` (B, H), one or two, are written, the first is ``step.output``."""
        exact = self.accumulate
        made = output_forward(step.share.to(exact), step.context.to(exact), step.bias, step.norm)
        for output in outputs:
            output.copy_(made)

    def output_backward(
        self,
        step: OutputStep,
        doutputs: Sequence[Tensor],
        dshare: Tensor,
        dcontext: Tensor,
        dnorm: Sequence[Tensor],
    ) -> None:
        """Runs the backward pass of `output_forward`.

        Args:
            step: Arguments and result of the step.
            doutputs: (B, H), one or two gradients of the output, which are added.
            dshare, dcontext: (B, P) are written.
            dnorm: Gradients of gain and shift of the layer normalisation, (R, H) each in the accumulate type, are added
                to; R as for the gradients of a cell's vectors. Empty without one.
        """
        exact = self.accumulate
        doutput = doutputs[0].to(exact) if len(doutputs) == 1 else doutputs[0].to(exact) + doutputs[1]
        share, context, output = (part.to(exact) for part in step[:3])
        made = output_backward(share, context, output, doutput, step.bias, step.norm)
        dshare.copy_(made.share)
        dcontext.copy_(made.context)
        for total, part in zip(dnorm, made.norm or (), strict=True):
            total += part
