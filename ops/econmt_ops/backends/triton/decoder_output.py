"""Output of a decoder step with a context gate or layer normalisation, one kernel per direction, a program a row.

The equations are those of `econmt_ops.cells.output`; everything is computed in float32. Sizes: B batch, H hidden size,
P width of the shares, H or with a gate 2H.
"""

# mypy: disable-error-code="assignment,unreachable"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.protocol import OutputStep
from econmt_ops.backends.triton.cells import row_stride
from econmt_ops.backends.triton.pointwise import sigmoid, tanh
from econmt_ops.backends.triton.step_cells import standardise, standardise_back, whole_rows


@triton.jit
def _load(tensor, row, stride, unit, inside):
    return tl.load(tensor + row * stride + unit, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _combined(share, context, bias, row, share_row, context_row, hidden, unit, inside):
    """Returns the argument of tanh before its normalisation, the gate, and the difference that it weighs."""
    s, c = _load(share, row, share_row, unit, inside), _load(context, row, context_row, unit, inside)
    if bias is None:
        return s + c, s, c
    else:
        z = sigmoid(s + c)
        c = _load(context, row, context_row, hidden + unit, inside) + _load(bias, 0, 0, unit, inside)
        difference = _load(share, row, share_row, hidden + unit, inside) - c
        return c + z * difference, z, difference


@triton.jit
def output_forward_kernel(
    share, context, bias, gain, shift, first, second, hidden, share_row, context_row, first_row, second_row,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Computes o of a row; bias, ``gain`` with ``shift``, and ``second`` may be None."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, UNITS)
    inside = unit < hidden
    x, _, _ = _combined(share, context, bias, row, share_row, context_row, hidden, unit, inside)
    if gain is not None:
        made, _ = standardise((tl.where(inside, x, 0.0),), inside, hidden)
        x = made[0] * _load(gain, 0, 0, unit, inside) + _load(shift, 0, 0, unit, inside)
    o = tanh(x)
    tl.store(first + row * first_row + unit, o.to(first.dtype.element_ty), mask=inside)
    if second is not None:
        tl.store(second + row * second_row + unit, o.to(second.dtype.element_ty), mask=inside)


@triton.jit
def output_backward_kernel(
    share, context, output, first, second, bias, gain, dshare, dcontext, dgain, dshift, hidden, share_row, context_row,
    output_row, first_row, second_row, dshare_row, dcontext_row, UNITS: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a row, and adds to its rows of dgain and dshift; see `output_forward_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, UNITS)
    inside = unit < hidden
    dx = _load(first, row, first_row, unit, inside)
    if second is not None:
        dx += _load(second, row, second_row, unit, inside)
    o = _load(output, row, output_row, unit, inside)
    dx *= 1.0 - o * o
    x, z, difference = _combined(share, context, bias, row, share_row, context_row, hidden, unit, inside)
    if gain is not None:
        made, factor = standardise((tl.where(inside, x, 0.0),), inside, hidden)
        of_gain, of_shift = dgain + row * hidden + unit, dshift + row * hidden + unit
        tl.store(of_gain, tl.load(of_gain, mask=inside, other=0.0) + dx * made[0], mask=inside)
        tl.store(of_shift, tl.load(of_shift, mask=inside, other=0.0) + dx, mask=inside)
        back = standardise_back((dx * _load(gain, 0, 0, unit, inside),), made, factor, inside, hidden)
        dx = back[0]
    kind: tl.constexpr = dshare.dtype.element_ty
    of_share, of_context = dshare + row * dshare_row + unit, dcontext + row * dcontext_row + unit
    if bias is None:
        tl.store(of_share, dx.to(kind), mask=inside)
        tl.store(of_context, dx.to(kind), mask=inside)
    else:
        dz = (dx * difference * z * (1.0 - z)).to(kind)
        tl.store(of_share, dz, mask=inside)
        tl.store(of_context, dz, mask=inside)
        tl.store(of_share + hidden, (dx * z).to(kind), mask=inside)
        tl.store(of_context + hidden, (dx * (1.0 - z)).to(kind), mask=inside)


def forward(step: OutputStep, outputs: Sequence[Tensor]) -> None:
    """Implements `EagerSteps.output_forward`."""
    gain, shift = step.norm or (None, None)
    first, second = (*outputs, None)[:2]
    rows, hidden = outputs[0].shape
    grid, compiled_with = whole_rows(rows, hidden)
    output_forward_kernel[grid](
        step.share, step.context, step.bias, gain, shift, first, second, hidden,
        *map(row_stride, (step.share, step.context, first, second)), **compiled_with,
    )  # fmt: skip


def backward(
    step: OutputStep, doutputs: Sequence[Tensor], dshare: Tensor, dcontext: Tensor, dnorm: Sequence[Tensor]
) -> None:
    """Implements `EagerSteps.output_backward`."""
    gain = None if step.norm is None else step.norm[0]
    first, second = (*doutputs, None)[:2]
    dgain, dshift = dnorm or (None, None)
    rows, hidden = step.output.shape
    grid, compiled_with = whole_rows(rows, hidden)
    output_backward_kernel[grid](
        step.share, step.context, step.output, first, second, step.bias, gain, dshare, dcontext, dgain, dshift,
        hidden, *map(row_stride, (step.share, step.context, step.output, first, second, dshare, dcontext)),
        **compiled_with,
    )  # fmt: skip
