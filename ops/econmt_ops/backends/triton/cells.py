"""LSTM cell of one step, forward and backward: one kernel each.

Only the sums before the nonlinearities, as the product wrote them, are saved for the backward pass; the nonlinearities
are recomputed. Computation is in float32. Sizes: B batch, H hidden size.
"""

# mypy: disable-error-code=assignment

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.protocol import Read
from econmt_ops.backends.triton.pointwise import tanh

_UNITS = 256
"""Maximum units of a row per program."""

_UNITS_OF_A_WARP = 128


@triton.jit
def load_four(tensor, hidden, unit, PARTS: tl.constexpr):
    """Loads PARTS consecutive vectors of H values, (UNITS,) each, in float32; zeros beyond H."""
    found = ()
    for part in tl.static_range(PARTS):
        value = tl.load(tensor + part * hidden + unit, mask=unit < hidden, other=0.0)
        found = found + (value.to(tl.float32),)
    return found


@triton.jit
def store_read(above, residual, keep, scale, h, row, unit, inside, above_row, residual_row, keep_row):
    """Writes the next layer's input, see `econmt_ops.backends.protocol.Read`; ``residual`` and ``keep`` may be None."""
    if residual is not None:
        h += tl.load(residual + row * residual_row + unit, mask=inside, other=0.0).to(tl.float32)
    if keep is not None:
        h = tl.where(tl.load(keep + row * keep_row + unit, mask=inside, other=0) != 0, h * scale, 0.0)
    tl.store(above + row * above_row + unit, h.to(above.dtype.element_ty), mask=inside)


@triton.jit
def load_given(given, flow, keep, scale, row, unit, inside, given_row, flow_row, keep_row):
    """Returns the gradients of a step's output, which went through dropout with ``keep``, and of h; all may be None."""
    total = tl.zeros(unit.shape, tl.float32)
    if given is not None:
        total += tl.load(given + row * given_row + unit, mask=inside, other=0.0).to(tl.float32)
        if keep is not None:
            total = tl.where(
                tl.load(keep + row * keep_row + unit, mask=inside, other=0) != 0, total * scale, 0.0
            )
    if flow is not None:
        total += tl.load(flow + row * flow_row + unit, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def load_gates(gates, row, stride, hidden, unit):
    """Returns the gates of a row after their nonlinearities, (UNITS,) each, from their sums."""
    i, f, g, o = load_four(gates + row * stride, hidden, unit, 4)
    return tl.sigmoid(i), tl.sigmoid(f), tanh(g), tl.sigmoid(o)


@triton.jit
def cell_forward(
    gates, before, after, first, second, read, residual, keep, scale, hidden, gates_row, before_row, after_row,
    first_row, second_row, read_row, residual_row, keep_row, UNITS: tl.constexpr,
):  # fmt: skip
    """Runs a step for a tile of units of a row; ``second``, ``read``, ``residual`` and ``keep`` may be None."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    i, f, g, o = load_gates(gates, row, gates_row, hidden, unit)
    c = f * tl.load(before + row * before_row + unit, mask=inside) + i * g
    tl.store(after + row * after_row + unit, c, mask=inside)
    h = (o * tanh(c)).to(first.dtype.element_ty)
    tl.store(first + row * first_row + unit, h, mask=inside)
    if second is not None:
        tl.store(second + row * second_row + unit, h, mask=inside)
    if read is not None:
        store_read(
            read, residual, keep, scale, h.to(tl.float32), row, unit, inside, read_row, residual_row, keep_row
        )


@triton.jit
def cell_backward(
    gates, before, after, first, second, dc, dgates, keep, scale, hidden, gates_row, before_row, after_row, first_row,
    second_row, dc_row, dgates_row, keep_row, UNITS: tl.constexpr,
):  # fmt: skip
    """Runs a step backward for a tile of units of a row; dh is ``first``, after dropout, plus ``second``, or None."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    i, f, g, o = load_gates(gates, row, gates_row, hidden, unit)
    squashed = tanh(tl.load(after + row * after_row + unit, mask=inside))
    dh = load_given(first, second, keep, scale, row, unit, inside, first_row, second_row, keep_row)
    total = tl.load(dc + row * dc_row + unit, mask=inside) + dh * o * (1.0 - squashed * squashed)
    earlier = tl.load(before + row * before_row + unit, mask=inside)
    kind: tl.constexpr = dgates.dtype.element_ty
    made = dgates + row * dgates_row + unit
    tl.store(made, (total * g * i * (1.0 - i)).to(kind), mask=inside)
    tl.store(made + hidden, (total * earlier * f * (1.0 - f)).to(kind), mask=inside)
    tl.store(made + 2 * hidden, (total * i * (1.0 - g * g)).to(kind), mask=inside)
    tl.store(made + 3 * hidden, (dh * squashed * o * (1.0 - o)).to(kind), mask=inside)
    tl.store(dc + row * dc_row + unit, total * f, mask=inside)


def division(rows: int, hidden: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns grid and compile-time arguments of the cell's kernels."""
    units = min(_UNITS, triton.next_power_of_2(hidden))
    warps = max(1, units // _UNITS_OF_A_WARP)
    return (rows, triton.cdiv(hidden, units)), {"UNITS": units, "num_warps": warps}


def row_stride(rows: Tensor | None) -> int:
    """Returns the stride between the rows of (R, N), whose last axis is contiguous; 0 for None.

    The last axis may have any stride if it has one value or the tensor is empty.
    """
    if rows is None:
        return 0
    assert rows.dim() == 2, rows.shape
    assert rows.stride(1) == 1 or rows.shape[1] == 1 or not rows.numel(), rows.stride()
    return rows.stride(0)


def forward(
    gates: Tensor,
    before: Tensor,
    after: Tensor,
    h: Sequence[Tensor],
    read: Read | None = None,
    *,
    keep: bool = True,  # noqa: ARG001 - the gates remain sums in either case
    recurrent: Tensor | None = None,
) -> None:
    """Runs one step of an LSTM cell; see `EagerSteps.cell_forward`."""
    if recurrent is not None:
        gates.add_(recurrent)
    rows, hidden = before.shape
    assert gates.shape == (rows, 4 * hidden)
    second = h[1] if len(h) > 1 else None
    if read is None:
        # The next layer reads h unchanged: the same kernel writes it to one more destination.
        h, read = h[:2], Read(h[2:])
    shown = read.destinations[0] if read.destinations else None
    kept = None if read.keep is None else read.keep.view(torch.int8)
    grid, compiled_with = division(rows, hidden)
    tensors = (gates, before, after, h[0], second, shown, read.residual, kept)
    strides = [row_stride(tensor) for tensor in tensors]
    cell_forward[grid](*tensors, read.scale, hidden, *strides, **compiled_with)
    for place in h[2:]:
        place.copy_(h[0])
    for place in read.destinations[1:]:
        place.copy_(read.destinations[0])


def backward(
    gates: Tensor,
    before: Tensor,
    after: Tensor,
    dh: Sequence[Tensor],
    dc: Tensor,
    dgates: Tensor,
    keep: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Runs one step backward; see `EagerSteps.cell_backward`. The gates are sums."""
    rows, hidden = before.shape
    assert gates.shape == dgates.shape == (rows, 4 * hidden)
    assert 1 <= len(dh) <= 2
    grid, compiled_with = division(rows, hidden)
    second = dh[1] if len(dh) > 1 else None
    kept = None if keep is None else keep.view(torch.int8)
    tensors = (gates, before, after, dh[0], second, dc, dgates, kept)
    strides = [row_stride(tensor) for tensor in tensors]
    cell_backward[grid](*tensors, scale, hidden, *strides, **compiled_with)
