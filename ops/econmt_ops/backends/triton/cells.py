"""LSTM cell of one step, forward and backward, and cell states of a block of steps: one kernel each.

Only the sums before the nonlinearities, as the product wrote them, are saved for the backward pass; the nonlinearities
are recomputed. Computation is in float32. Sizes: B batch, H hidden size, K steps of a block.
"""

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

_AHEAD = 8
"""Steps whose gates the scan of cells loads together."""


@triton.jit
def cell_forward(
    gates: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    read: tl.tensor,
    residual: tl.tensor,
    keep: tl.tensor,
    scale: tl.tensor,
    hidden: tl.tensor,
    gates_row: tl.tensor,
    before_row: tl.tensor,
    after_row: tl.tensor,
    first_row: tl.tensor,
    second_row: tl.tensor,
    read_row: tl.tensor,
    residual_row: tl.tensor,
    keep_row: tl.tensor,
    UNITS: tl.constexpr,
) -> None:
    """Runs a step for a tile of units of a row; ``second``, ``read``, ``residual`` and ``keep`` may be None."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    sums = gates + row * gates_row + unit
    i = tl.sigmoid(tl.load(sums, mask=inside).to(tl.float32))
    f = tl.sigmoid(tl.load(sums + hidden, mask=inside).to(tl.float32))
    g = tanh(tl.load(sums + 2 * hidden, mask=inside).to(tl.float32))
    o = tl.sigmoid(tl.load(sums + 3 * hidden, mask=inside).to(tl.float32))
    c = f * tl.load(before + row * before_row + unit, mask=inside) + i * g
    tl.store(after + row * after_row + unit, c, mask=inside)
    h = (o * tanh(c)).to(first.dtype.element_ty)
    tl.store(first + row * first_row + unit, h, mask=inside)
    if second is not None:
        tl.store(second + row * second_row + unit, h, mask=inside)
    if read is not None:
        shown = h.to(tl.float32)
        if residual is not None:
            shown += tl.load(residual + row * residual_row + unit, mask=inside).to(tl.float32)
        if keep is not None:
            kept = tl.load(keep + row * keep_row + unit, mask=inside, other=0)
            shown = tl.where(kept != 0, shown * scale, 0.0)
        tl.store(read + row * read_row + unit, shown.to(read.dtype.element_ty), mask=inside)


@triton.jit
def cell_backward(
    gates: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    dc: tl.tensor,
    dgates: tl.tensor,
    keep: tl.tensor,
    scale: tl.tensor,
    hidden: tl.tensor,
    gates_row: tl.tensor,
    before_row: tl.tensor,
    after_row: tl.tensor,
    first_row: tl.tensor,
    second_row: tl.tensor,
    dc_row: tl.tensor,
    dgates_row: tl.tensor,
    keep_row: tl.tensor,
    UNITS: tl.constexpr,
) -> None:
    """Runs a step backward for a tile of units of a row; dh is ``first``, after dropout, plus ``second``, or None."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    sums = gates + row * gates_row + unit
    i = tl.sigmoid(tl.load(sums, mask=inside).to(tl.float32))
    f = tl.sigmoid(tl.load(sums + hidden, mask=inside).to(tl.float32))
    g = tanh(tl.load(sums + 2 * hidden, mask=inside).to(tl.float32))
    o = tl.sigmoid(tl.load(sums + 3 * hidden, mask=inside).to(tl.float32))
    squashed = tanh(tl.load(after + row * after_row + unit, mask=inside))
    dh = tl.load(first + row * first_row + unit, mask=inside).to(tl.float32)
    if keep is not None:
        kept = tl.load(keep + row * keep_row + unit, mask=inside, other=0)
        dh = tl.where(kept != 0, dh * scale, 0.0)
    if second is not None:
        dh += tl.load(second + row * second_row + unit, mask=inside).to(tl.float32)
    total = tl.load(dc + row * dc_row + unit, mask=inside) + dh * o * (1.0 - squashed * squashed)
    earlier = tl.load(before + row * before_row + unit, mask=inside)
    kind: tl.constexpr = dgates.dtype.element_ty
    made = dgates + row * dgates_row + unit
    tl.store(made, (total * g * i * (1.0 - i)).to(kind), mask=inside)
    tl.store(made + hidden, (total * earlier * f * (1.0 - f)).to(kind), mask=inside)
    tl.store(made + 2 * hidden, (total * i * (1.0 - g * g)).to(kind), mask=inside)
    tl.store(made + 3 * hidden, (dh * squashed * o * (1.0 - o)).to(kind), mask=inside)
    tl.store(dc + row * dc_row + unit, total * f, mask=inside)


@triton.jit(do_not_specialize=["steps"])
def cell_scan(
    gates: tl.tensor,
    start: tl.tensor,
    cells: tl.tensor,
    steps: tl.tensor,
    hidden: tl.tensor,
    gates_step: tl.tensor,
    gates_row: tl.tensor,
    start_row: tl.tensor,
    cells_step: tl.tensor,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """Computes c for a tile of units of a row, through all steps; writes contiguous cells (K + 1, B, H).

    The gates of AHEAD steps are loaded together, because a step waits for the step before, but not its loads.
    """
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    c = tl.load(start + row * start_row + unit, mask=inside)
    place = cells + row * hidden + unit
    tl.store(place, c, mask=inside)
    sums = gates + row * gates_row + unit
    for first in range(0, steps, AHEAD):
        loaded = ()
        for n in tl.static_range(AHEAD):
            there = inside & (first + n < steps)
            now = sums + n * gates_step
            loaded = loaded + (  # type: ignore[assignment]
                tl.load(now, mask=there, other=0.0),
                tl.load(now + hidden, mask=there, other=0.0),
                tl.load(now + 2 * hidden, mask=there, other=0.0),
            )
        for n in tl.static_range(AHEAD):
            i = tl.sigmoid(loaded[3 * n].to(tl.float32))
            f = tl.sigmoid(loaded[3 * n + 1].to(tl.float32))  # type: ignore[unreachable]
            c = f * c + i * tanh(loaded[3 * n + 2].to(tl.float32))
            place += cells_step
            tl.store(place, c, mask=inside & (first + n < steps))
        sums += AHEAD * gates_step


def division(rows: int, hidden: int, most: int = _UNITS) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns grid and compile-time arguments of the cell's kernels, whose programs have ``most`` units at most."""
    units = min(most, triton.next_power_of_2(hidden))
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


def scan(gates: Tensor, first: Tensor) -> Tensor:
    """Returns the cell states of a block; see `EagerSteps.scan_cells`. The gates are sums."""
    steps, rows, _ = gates.shape
    hidden = first.shape[1]
    assert gates.stride(2) == 1
    cells = first.new_empty(steps + 1, rows, hidden)
    grid, compiled_with = division(rows, hidden, _UNITS_OF_A_WARP)
    strides = gates.stride(0), gates.stride(1), row_stride(first), rows * hidden
    cell_scan[grid](gates, first, cells, steps, hidden, *strides, AHEAD=_AHEAD, **compiled_with)
    return cells
