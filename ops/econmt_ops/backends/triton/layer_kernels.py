"""Kernels around an LSTM layer's recurrence and products: casts, sums of columns and the largest gradient.

Each is one launch where PyTorch would need several: for small layers launching takes longer than computing.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.triton.launching import Launch, launch_of

_TILE = 2048
"""Values of a tile that one program copies or looks at."""

_LARGEST_FLOAT16 = tl.constexpr(65504.0)

_COLUMNS = 64
"""Columns that a program of `column_sums` adds up."""

_ROWS = 32
"""Rows that it looks at together."""

PARTIALS = 32
"""Parts into which `column_sums` divides the rows, at most."""


@triton.jit
def _fitted(values, kind: tl.constexpr):
    """Casts values; finite ones beyond float16 become its largest number."""
    if kind == tl.float16:
        values = values.to(tl.float32)
        large = (tl.abs(values) > _LARGEST_FLOAT16) & (tl.abs(values) < float("inf"))
        values = tl.where(large, tl.where(values > 0, _LARGEST_FLOAT16, -_LARGEST_FLOAT16), values)
    return values.to(kind)


@triton.jit
def _copy(tile, matrix, lengths, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
          PADDED: tl.constexpr):  # fmt: skip
    """Copies a tile of ROWS rows from (T, B, WIDTH) to (T B, WIDE), whose other columns are zero.

    ``matrix``: pointers to both, T B, B, and the strides of T and B in the first. If PADDED, steps from lengths (B,) on
    are zero, too.
    """
    given, made, rows, batch, step, row = matrix
    at = tile * ROWS + tl.arange(0, ROWS)
    inside = (at < rows)[:, None]
    read = inside
    if PADDED:
        read = inside & (at // batch < tl.load(lengths + at % batch, mask=at < rows, other=0))[:, None]
    source = given + ((at // batch).to(tl.int64) * step + (at % batch).to(tl.int64) * row)[:, None]
    target = made + at.to(tl.int64)[:, None] * WIDE
    for first in tl.static_range(0, WIDE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        values = tl.load(source + column, mask=read & (column < WIDTH), other=0.0)
        tl.store(target + column, _fitted(values, made.dtype.element_ty), mask=inside & (column < WIDE))


@triton.jit(
    do_not_specialize=["steps", "batch", "zero_count", "weight_first", "recurrent_first", "rest_first"]
)
def _prepare(inputs, rows, weight, wide_weight, recurrent, cast_recurrent, bias, other_bias, made_bias, zeros, lengths,
             steps, batch, zero_count, weight_first, recurrent_first, rest_first, step, row, weight_row, recurrent_row,
             WIDTH: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, READS: tl.constexpr, PADDED: tl.constexpr,
             WEIGHT: tl.constexpr, RECURRENT: tl.constexpr, BIASES: tl.constexpr, TILE: tl.constexpr,
             WIDE_BLOCK: tl.constexpr, H_BLOCK: tl.constexpr):  # fmt: skip
    """Does the work of `preparation`: each program a tile of inputs, of a matrix, or of the bias and the zeros."""
    program = tl.program_id(0)
    if READS:  # noqa: SIM102  a compile-time condition
        if program < weight_first:
            matrix = inputs, rows, steps * batch, batch, step, row
            _copy(program, matrix, lengths, WIDTH, WIDE, TILE // WIDE_BLOCK, WIDE_BLOCK, PADDED)
    if WEIGHT:  # noqa: SIM102
        if (program >= weight_first) & (program < recurrent_first):
            matrix = weight, wide_weight, 4 * H, 4 * H, 0, weight_row
            _copy(program - weight_first, matrix, lengths, WIDTH, WIDE, TILE // WIDE_BLOCK, WIDE_BLOCK, False)
    if RECURRENT:  # noqa: SIM102
        if (program >= recurrent_first) & (program < rest_first):
            matrix = recurrent, cast_recurrent, 4 * H, 4 * H, 0, recurrent_row
            _copy(program - recurrent_first, matrix, lengths, H, H, TILE // H_BLOCK, H_BLOCK, False)
    if program >= rest_first:
        at = (program - rest_first) * TILE + tl.arange(0, TILE)
        tl.store(zeros + at, tl.zeros((TILE,), tl.int32), mask=at < zero_count)
        if BIASES > 0:
            total = tl.load(bias + at, mask=at < 4 * H, other=0.0)
            if BIASES > 1:
                total += tl.load(other_bias + at, mask=at < 4 * H, other=0.0)
            tl.store(made_bias + at, total.to(made_bias.dtype.element_ty), mask=at < 4 * H)


@functools.cache
def preparation(
    shape: tuple[int, int, int] | None,
    padded: bool,
    width: int,
    wide: int,
    hidden: int,
    casts: tuple[bool, bool],
    biases: int,
    zeros: int,
    types: tuple[torch.dtype, ...],
) -> tuple[Launch, int, int, int, int]:
    """Returns a launch that makes what a layer's recurrence and products read, and its programs.

    The launch takes the tensors inputs (T, B, I) and rows (T B, I'), to which the inputs are copied with zeros in
    additional columns; input weights (4H, I) and (4H, I') likewise; recurrent weights (4H, H) and (4H, H); two biases
    and their sum, (4H,) each; an int32 workspace, whose beginning becomes zero; and lengths (B,). Any tensor stands for
    one that is not read. Its integers are T, B, the number of zeros and the last three results of this function; then
    come the strides of step and row of the inputs, and of the rows of both weights.

    Args:
        shape: T, B and I, or None to copy no inputs.
        padded: True if inputs from the lengths on are replaced by zeros.
        width, wide: columns of inputs and input weights before and after they are widened.
        hidden: H.
        casts: True each if the input weights and the recurrent weights are copied.
        biases: the number of biases.
        zeros: the number of zeros.
        types: of the tensors, in this order.

    Returns:
        The launch, its programs, and the first program for input weights, recurrent weights, and biases with zeros.
    """
    wide_block = min(1024, triton.next_power_of_2(max(wide, 1)))
    hidden_block = min(1024, triton.next_power_of_2(hidden))
    weight_first = 0 if shape is None else triton.cdiv(shape[0] * shape[1], _TILE // wide_block)
    recurrent_first = weight_first + (triton.cdiv(4 * hidden, _TILE // wide_block) if casts[0] else 0)
    rest_first = recurrent_first + (triton.cdiv(4 * hidden, _TILE // hidden_block) if casts[1] else 0)
    programs = rest_first + triton.cdiv(max(zeros, 4 * hidden if biases else 0), _TILE)
    launch = launch_of(
        _prepare, *types, WIDTH=width, WIDE=wide, H=hidden, READS=shape is not None, PADDED=padded, WEIGHT=casts[0],
        RECURRENT=casts[1], BIASES=biases, TILE=_TILE, WIDE_BLOCK=wide_block, H_BLOCK=hidden_block, num_warps=4,
    )  # fmt: skip
    return launch, programs, weight_first, recurrent_first, rest_first


@triton.jit(do_not_specialize=["arrived_at", "partials_at", "rows", "span"])
def _column_sums(values, sums, workspace, arrived_at, partials_at, rows, span, PARTS: tl.constexpr, WIDTH: tl.constexpr,
                 COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Adds up ``span`` rows of some columns; the last program to do so for these columns adds up the parts."""
    part, block = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = part * span
    end = tl.minimum(begin + span, rows)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (column < WIDTH)[None, :]
        at = values + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    own = tl.sum(total, 0)
    partials = (workspace + partials_at).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(partials + part * WIDTH + column, own, mask=column < WIDTH)
    tl.debug_barrier()
    before = tl.atomic_add(workspace + arrived_at + block, 1)
    if before == PARTS - 1:
        tl.debug_barrier()
        each = tl.arange(0, PARTS)
        mask = (column < WIDTH)[None, :] & (each < PARTS)[:, None]
        found = tl.load(
            partials + each[:, None] * WIDTH + column[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        tl.store(sums + column, tl.sum(found, 0).to(sums.dtype.element_ty), mask=column < WIDTH)


def counters_of_sums(width: int) -> int:
    """Returns how many counters `column_sums` needs for a matrix of so many columns."""
    return -(-width // _COLUMNS)


def column_sums(values: Tensor, sums: Tensor, workspace: Tensor, arrived: int, partials: int) -> None:
    """Adds up the rows of a matrix in float32, always in the same order.

    Args:
        values: (N, M), contiguous.
        sums: (M,) is written.
        workspace: int32.
        arrived: where in the workspace `counters_of_sums` zeros are, which are overwritten.
        partials: where in it `PARTIALS` M numbers may be written.
    """
    rows, width = values.shape
    launch, parts = _summation(rows, width, values.dtype, sums.dtype)
    programs = parts * counters_of_sums(width)
    launch(programs, (values, sums, workspace), (arrived, partials, rows, -(-rows // parts)))


@functools.cache
def _summation(rows: int, width: int, kind: torch.dtype, made: torch.dtype) -> tuple[Launch, int]:
    """Returns the launch of `column_sums`, and into how many parts it divides the rows."""
    parts = min(PARTIALS, triton.next_power_of_2(triton.cdiv(max(rows, 1), 2 * _ROWS)))
    launch = launch_of(
        _column_sums, kind, made, PARTS=parts, WIDTH=width, COLUMNS=_COLUMNS, ROWS=_ROWS, num_warps=4
    )
    return launch, parts


@triton.jit
def _largest_of(given, result, tile, rows, batch, step, row, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    at = tile * ROWS + tl.arange(0, ROWS)
    source = given + ((at // batch).to(tl.int64) * step + (at % batch).to(tl.int64) * row)[:, None]
    found = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        values = tl.load(source + column, mask=(at < rows)[:, None] & (column < WIDTH), other=0.0).to(
            tl.float32
        )
        # Without their sign, floating point numbers are in the order of their bits; NaN is above all others.
        found = tl.maximum(found, tl.abs(values).to(tl.int32, bitcast=True))
    tl.atomic_max(result, tl.max(tl.max(found, 1), 0))


@triton.jit(do_not_specialize=["place", "steps", "batch", "tiles", "last_tiles"])
def _largest(doutputs, last_h, last_c, results, place, steps, batch, tiles, last_tiles, step, row, WIDTH: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_LAST_H: tl.constexpr,
             HAS_LAST_C: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    result = results + place
    if program < tiles:
        _largest_of(doutputs, result, program, steps * batch, batch, step, row, WIDTH, ROWS, COLUMNS)
    elif program < tiles + last_tiles:
        # All directions' last states together have the B rows of one step.
        if HAS_LAST_H:
            _largest_of(last_h, result, program - tiles, batch, batch, 0, WIDTH, WIDTH, ROWS, COLUMNS)
        if HAS_LAST_C:
            _largest_of(last_c, result, program - tiles, batch, batch, 0, WIDTH, WIDTH, ROWS, COLUMNS)


def largest(
    doutputs: Tensor, last_h: Tensor | None, last_c: Tensor | None, results: Tensor, place: int
) -> None:
    """Finds the largest absolute value of all gradients that enter a layer.

    Args:
        doutputs: (T, B, D H), last stride 1.
        last_h, last_c: (D, B, H), contiguous; or None.
        results: int32. The number at ``place`` must be zero; it becomes the bits of the value as float32.
        place: see ``results``.
    """
    steps, batch, width = doutputs.shape
    launch, tiles, last_tiles = _search(
        steps * batch, width, 0 if last_h is None and last_c is None else batch, doutputs.dtype,
        doutputs.dtype if last_h is None else last_h.dtype, last_h is not None, last_c is not None,
    )  # fmt: skip
    tensors = (
        doutputs,
        doutputs if last_h is None else last_h,
        doutputs if last_c is None else last_c,
        results,
    )
    launch(
        tiles + last_tiles, tensors, (place, steps, batch, tiles, last_tiles), tuple(doutputs.stride()[:2])
    )


@functools.cache
def _search(
    rows: int, width: int, last_rows: int, kind: torch.dtype, last_kind: torch.dtype, has_h: bool, has_c: bool
) -> tuple[Launch, int, int]:
    """Returns the launch of `largest`, and its programs for the outputs' gradient and for those of the last state."""
    columns = min(1024, triton.next_power_of_2(width))
    launch = launch_of(
        _largest, kind, last_kind, WIDTH=width, ROWS=_TILE // columns, COLUMNS=columns, HAS_LAST_H=has_h,
        HAS_LAST_C=has_c, num_warps=4,
    )  # fmt: skip
    return launch, triton.cdiv(rows, _TILE // columns), triton.cdiv(last_rows, _TILE // columns)
