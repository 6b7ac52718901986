"""One step of a GRU and of a layer-normalised LSTM between its products, one kernel per direction.

As in `econmt_ops.backends.triton.cells` only the products are saved for the backward pass; everything else is
recomputed, in float32. Padded rows keep their states and output zero; backward they keep the gradients of their states
and give zero gradients to the products. The equations are those of `econmt_ops.cells.gru` and
`econmt_ops.cells.lnlstm`. Sizes: B batch, H hidden.
"""

# mypy: disable-error-code="assignment,unreachable"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.protocol import CellStep, Read, StepGradients
from econmt_ops.backends.triton.cells import division, load_four, load_given, row_stride, store_read
from econmt_ops.backends.triton.pointwise import sigmoid, tanh
from econmt_ops.cells.attention import LAYER_NORM_EPSILON

_EPSILON: tl.constexpr = tl.constexpr(LAYER_NORM_EPSILON)

_VALUES_A_WARP = 64
"""Units of a row per warp, in kernels where a program handles a whole row."""


@triton.jit
def gru_forward(
    read, recurrent, before, after, output, padding, above, residual, keep, scale, hidden, read_row, recurrent_row,
    before_row, after_row, output_row, above_row, residual_row, keep_row, UNITS: tl.constexpr,
):  # fmt: skip
    """Runs a step for a tile of units of a row; ``padding`` (B,) and ``above`` may be None, ``after`` is ``before``."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    s = load_four(read + row * read_row, hidden, unit, 3)
    v = load_four(recurrent + row * recurrent_row, hidden, unit, 3)
    h = tl.load(before + row * before_row + unit, mask=inside, other=0.0).to(tl.float32)
    r, z = sigmoid(s[0] + v[0]), sigmoid(s[1] + v[1])
    n = tanh(s[2] + r * v[2])
    made = n + z * (h - n)
    shown = made
    if padding is not None:
        is_padding = tl.load(padding + row) != 0
        shown = tl.where(is_padding, 0.0, made)
        made = tl.where(is_padding, h, made)
    tl.store(after + row * after_row + unit, made.to(after.dtype.element_ty), mask=inside)
    shown = shown.to(output.dtype.element_ty)
    tl.store(output + row * output_row + unit, shown, mask=inside)
    if above is not None:
        store_read(above, residual, keep, scale, shown.to(tl.float32), row, unit, inside, above_row, residual_row,
                   keep_row)  # fmt: skip


@triton.jit
def gru_backward(
    read, recurrent, before, dh, given, padding, flow, keep, scale, dread, drecurrent, hidden, read_row, recurrent_row,
    before_row, dh_row, given_row, flow_row, keep_row, dread_row, drecurrent_row, UNITS: tl.constexpr,
):  # fmt: skip
    """Runs a step backward for a tile of units of a row; overwrites dh. See `load_given`; ``padding`` may be None."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    s = load_four(read + row * read_row, hidden, unit, 3)
    v = load_four(recurrent + row * recurrent_row, hidden, unit, 3)
    h = tl.load(before + row * before_row + unit, mask=inside, other=0.0).to(tl.float32)
    kept = tl.load(dh + row * dh_row + unit, mask=inside, other=0.0).to(tl.float32)
    total = kept + load_given(given, flow, keep, scale, row, unit, inside, given_row, flow_row, keep_row)
    is_padding = False
    if padding is not None:
        is_padding = tl.load(padding + row) != 0
        total = tl.where(is_padding, 0.0, total)
    r, z = sigmoid(s[0] + v[0]), sigmoid(s[1] + v[1])
    n = tanh(s[2] + r * v[2])
    dn = total * (1.0 - z) * (1.0 - n * n)
    dz = total * (h - n) * z * (1.0 - z)
    dr = dn * v[2] * r * (1.0 - r)
    through = total * z
    if padding is not None:
        through = tl.where(is_padding, kept, through)
    tl.store(dh + row * dh_row + unit, through.to(dh.dtype.element_ty), mask=inside)
    kind: tl.constexpr = dread.dtype.element_ty
    of_read, of_recurrent = dread + row * dread_row + unit, drecurrent + row * drecurrent_row + unit
    tl.store(of_read, dr.to(kind), mask=inside)
    tl.store(of_read + hidden, dz.to(kind), mask=inside)
    tl.store(of_read + 2 * hidden, dn.to(kind), mask=inside)
    tl.store(of_recurrent, dr.to(kind), mask=inside)
    tl.store(of_recurrent + hidden, dz.to(kind), mask=inside)
    tl.store(of_recurrent + 2 * hidden, (dn * r).to(kind), mask=inside)


@triton.jit
def standardise(values, inside, count):
    """Normalises vectors (UNITS,) to joint mean 0 and variance 1 over ``count`` values; returns the factor too."""
    total = values[0]
    for part in tl.static_range(1, len(values)):
        total += values[part]
    mean = tl.sum(total, 0) / count
    centred = ()
    squares = total * 0.0
    for part in tl.static_range(len(values)):
        value = tl.where(inside, values[part] - mean, 0.0)
        squares += value * value
        centred = centred + (value,)
    factor = tl.rsqrt(tl.sum(squares, 0) / count + _EPSILON)
    made = ()
    for part in tl.static_range(len(values)):
        made = made + (centred[part] * factor,)
    return made, factor


@triton.jit
def standardise_back(dvalues, made, factor, inside, count):
    """Computes the backward pass of :func:`standardise`; zeros beyond H in both."""
    total, inner = dvalues[0], dvalues[0] * made[0]
    for part in tl.static_range(1, len(made)):
        total += dvalues[part]
        inner += dvalues[part] * made[part]
    mean, slope = tl.sum(total, 0) / count, tl.sum(inner, 0) / count
    found = ()
    for part in tl.static_range(len(made)):
        found = found + (tl.where(inside, (dvalues[part] - mean - made[part] * slope) * factor, 0.0),)
    return found


@triton.jit
def normal_sums(read, recurrent, row, read_row, recurrent_row, first, second, third, hidden, unit, inside,
                PER_GATE: tl.constexpr):  # fmt: skip
    """Returns the gates' sums, and the results of `standardise` for both products (per gate: for the four sums, twice).

    first, second, third: (4 H,), gain and shift of a per-gate layer and an unused one, or the bias and both gains.
    """
    s = load_four(read + row * read_row, hidden, unit, 4)
    v = load_four(recurrent + row * recurrent_row, hidden, unit, 4)
    one, two = load_four(first, hidden, unit, 4), load_four(second, hidden, unit, 4)
    sums = ()
    if PER_GATE:
        y, factors = (), ()
        for part in tl.static_range(4):
            own, factor = standardise((s[part] + v[part],), inside, hidden)
            sums = sums + (own[0] * one[part] + two[part],)
            y = y + (own[0],)
            factors = factors + (factor,)
        return sums, y, factors, y, factors
    else:
        three = load_four(third, hidden, unit, 4)
        y, factor = standardise(s, inside, 4 * hidden)
        other, other_factor = standardise(v, inside, 4 * hidden)
        for part in tl.static_range(4):
            sums = sums + (y[part] * two[part] + other[part] * three[part] + one[part],)
        return sums, y, factor, other, other_factor


@triton.jit
def lnlstm_forward(
    read, recurrent, before, h, after, output, first, second, third, gain, shift, padding, h_before, above, residual,
    keep, scale, hidden, read_row, recurrent_row, before_row, h_row, after_row, output_row, h_before_row, above_row,
    residual_row, keep_row, PER_GATE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Runs a step for one row per program. h, after: states after the step; may alias h_before and before."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, UNITS)
    inside = unit < hidden
    sums, _, _, _, _ = normal_sums(
        read, recurrent, row, read_row, recurrent_row, first, second, third, hidden, unit, inside, PER_GATE
    )
    i, f, g, o = sigmoid(sums[0]), sigmoid(sums[1]), tanh(sums[2]), sigmoid(sums[3])
    earlier = tl.load(before + row * before_row + unit, mask=inside, other=0.0)
    c = f * earlier + i * g
    normal, _ = standardise((tl.where(inside, c, 0.0),), inside, hidden)
    stretch = tl.load(gain + unit, mask=inside, other=0.0)
    made = o * tanh(normal[0] * stretch + tl.load(shift + unit, mask=inside, other=0.0))
    shown = made
    if padding is not None:
        is_padding = tl.load(padding + row) != 0
        kept = tl.load(h_before + row * h_before_row + unit, mask=inside, other=0.0).to(tl.float32)
        shown = tl.where(is_padding, 0.0, made)
        made = tl.where(is_padding, kept, made)
        c = tl.where(is_padding, earlier, c)
    tl.store(h + row * h_row + unit, made.to(h.dtype.element_ty), mask=inside)
    tl.store(after + row * after_row + unit, c, mask=inside)
    shown = shown.to(output.dtype.element_ty)
    tl.store(output + row * output_row + unit, shown, mask=inside)
    if above is not None:
        store_read(above, residual, keep, scale, shown.to(tl.float32), row, unit, inside, above_row, residual_row,
                   keep_row)  # fmt: skip


@triton.jit
def add_four(tensor, values, hidden, unit, inside):
    """Adds vectors to consecutive ones in memory."""
    for part in tl.static_range(len(values)):
        at = tensor + part * hidden + unit
        tl.store(at, tl.load(at, mask=inside) + values[part], mask=inside)


@triton.jit
def lnlstm_backward(
    read, recurrent, before, first, second, third, gain, shift, dh, dc, given, padding, flow, keep, scale, dread,
    drecurrent, dfirst, dsecond, dthird, dgain, dshift, hidden, read_row, recurrent_row, before_row, dh_row, dc_row,
    given_row, flow_row, keep_row, dread_row, drecurrent_row, PER_GATE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Runs a step backward for one row per program; overwrites dh and dc, adds to its row of dfirst to dshift."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, UNITS)
    inside = unit < hidden
    sums, y, factor, other, other_factor = normal_sums(
        read, recurrent, row, read_row, recurrent_row, first, second, third, hidden, unit, inside, PER_GATE
    )
    i, f, g, o = sigmoid(sums[0]), sigmoid(sums[1]), tanh(sums[2]), sigmoid(sums[3])
    earlier = tl.load(before + row * before_row + unit, mask=inside, other=0.0)
    normal, cell_factor = standardise((tl.where(inside, f * earlier + i * g, 0.0),), inside, hidden)
    stretch = tl.load(gain + unit, mask=inside, other=0.0)
    squashed = tanh(normal[0] * stretch + tl.load(shift + unit, mask=inside, other=0.0))
    kept_dh = tl.load(dh + row * dh_row + unit, mask=inside, other=0.0).to(tl.float32)
    kept_dc = tl.load(dc + row * dc_row + unit, mask=inside, other=0.0)
    of_h, of_c = kept_dh, kept_dc
    of_h += load_given(given, flow, keep, scale, row, unit, inside, given_row, flow_row, keep_row)
    is_padding = False
    if padding is not None:
        is_padding = tl.load(padding + row) != 0
        of_h, of_c = tl.where(is_padding, 0.0, of_h), tl.where(is_padding, 0.0, of_c)
    dshown = of_h * o * (1.0 - squashed * squashed)
    through = standardise_back((dshown * stretch,), normal, cell_factor, inside, hidden)
    total = of_c + through[0]
    dsums = (
        total * g * i * (1.0 - i), total * earlier * f * (1.0 - f), total * i * (1.0 - g * g),
        of_h * squashed * o * (1.0 - o),
    )  # fmt: skip
    add_four(dgain + row * hidden, (dshown * normal[0],), hidden, unit, inside)
    add_four(dshift + row * hidden, (dshown,), hidden, unit, inside)
    back, other_back, of_gain, of_other = (), (), (), ()
    one, two = load_four(first, hidden, unit, 4), load_four(second, hidden, unit, 4)
    for part in tl.static_range(4):
        of_gain = of_gain + (dsums[part] * y[part],)
        of_other = of_other + (dsums[part] * other[part],)
    if PER_GATE:
        for part in tl.static_range(4):
            own = standardise_back((dsums[part] * one[part],), (y[part],), factor[part], inside, hidden)
            back = back + own
        other_back = back
        add_four(dfirst + row * 4 * hidden, of_gain, hidden, unit, inside)
        add_four(dsecond + row * 4 * hidden, dsums, hidden, unit, inside)
    else:
        three = load_four(third, hidden, unit, 4)
        scaled, other_scaled = (), ()
        for part in tl.static_range(4):
            scaled = scaled + (dsums[part] * two[part],)
            other_scaled = other_scaled + (dsums[part] * three[part],)
        back = standardise_back(scaled, y, factor, inside, 4 * hidden)
        other_back = standardise_back(other_scaled, other, other_factor, inside, 4 * hidden)
        add_four(dfirst + row * 4 * hidden, dsums, hidden, unit, inside)
        add_four(dsecond + row * 4 * hidden, of_gain, hidden, unit, inside)
        add_four(dthird + row * 4 * hidden, of_other, hidden, unit, inside)
    kind: tl.constexpr = dread.dtype.element_ty
    for part in tl.static_range(4):
        at = part * hidden + unit
        tl.store(dread + row * dread_row + at, back[part].to(kind), mask=inside)
        tl.store(drecurrent + row * drecurrent_row + at, other_back[part].to(kind), mask=inside)
    left_h, left_c = total * 0.0, total * f
    if padding is not None:
        left_h, left_c = tl.where(is_padding, kept_dh, left_h), tl.where(is_padding, kept_dc, left_c)
    tl.store(dh + row * dh_row + unit, left_h.to(dh.dtype.element_ty), mask=inside)
    tl.store(dc + row * dc_row + unit, left_c, mask=inside)


def whole_rows(rows: int, hidden: int) -> tuple[tuple[int], dict[str, int]]:
    """Returns grid and compile-time arguments of kernels whose programs handle whole rows."""
    units = triton.next_power_of_2(max(1, hidden))
    return (rows,), {"UNITS": units, "num_warps": max(1, min(16, units // _VALUES_A_WARP))}


def _strides(*tensors: Tensor | None) -> list[int]:
    return [row_stride(tensor) for tensor in tensors]


def _vectors(extra: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns first, second, third, gain and shift for the kernels of a layer-normalised cell."""
    *sums, gain, shift = extra
    return sums[0], sums[1], sums[-1], gain, shift


def forward(step: CellStep, after: Sequence[Tensor], output: Tensor, read: Read | None = None) -> None:
    """Runs one step; see `EagerSteps.step_forward_into`. A GRU has the state h, the LSTM h and c."""
    above = residual = keep = None
    scale = 1.0
    if read is not None:
        ((above,), residual, keep, scale) = read
        keep = None if keep is None else keep.view(torch.int8)
    _, product, recurrent, before, extra, padding = step
    rows, hidden = before[0].shape
    mask = None if padding is None else padding.view(torch.int8)
    if len(before) == 1:
        grid, compiled_with = division(rows, hidden)
        tensors = (product, recurrent, before[0], after[0], output)
        gru_forward[grid](
            *tensors, mask, above, residual, keep, scale, hidden, *_strides(*tensors, above, residual, keep),
            **compiled_with,
        )  # fmt: skip
        return
    grid, compiled_with = whole_rows(rows, hidden)
    tensors = (product, recurrent, before[1], after[0], after[1], output)
    lnlstm_forward[grid](
        *tensors, *_vectors(extra), mask, before[0], above, residual, keep, scale, hidden,
        *_strides(*tensors, before[0], above, residual, keep), PER_GATE=len(extra) == 4, **compiled_with,
    )  # fmt: skip


def backward(
    step: CellStep,
    after: Sequence[Tensor],  # noqa: ARG001 - recomputed
    dstate: Sequence[Tensor],
    doutput: Tensor | None,
    gradients: StepGradients,
    *,
    flow: Tensor | None = None,
    keep: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Runs one step backward; see `EagerSteps.step_backward_into`; ``gradients.extra`` are (B, .) each."""
    _, read, recurrent, before, extra, padding = step
    dread, drecurrent, dextra = gradients
    rows, hidden = before[0].shape
    mask = None if padding is None else padding.view(torch.int8)
    keep = None if keep is None else keep.view(torch.int8)
    if len(before) == 1:
        grid, compiled_with = division(rows, hidden)
        gru_backward[grid](
            read, recurrent, before[0], dstate[0], doutput, mask, flow, keep, scale, dread, drecurrent, hidden,
            *_strides(read, recurrent, before[0], dstate[0], doutput, flow, keep, dread, drecurrent), **compiled_with,
        )  # fmt: skip
        return
    grid, compiled_with = whole_rows(rows, hidden)
    lnlstm_backward[grid](
        read, recurrent, before[1], *_vectors(extra), *dstate, doutput, mask, flow, keep, scale, dread, drecurrent,
        *_vectors(dextra), hidden,
        *_strides(read, recurrent, before[1], *dstate, doutput, flow, keep, dread, drecurrent),
        PER_GATE=len(extra) == 4, **compiled_with,
    )  # fmt: skip
