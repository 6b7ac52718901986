"""Kernels around an LSTM layer's recurrence and products: casts and sums of columns.

Each is one launch where PyTorch would need several: for small layers launching takes longer than computing.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.triton.launching import Launch, launch_of
from econmt_ops.backends.triton.persistent_product import narrowed, power_of_two

_TILE = 2048
"""Values of a tile that one program copies or looks at."""

_EXPONENT = tl.constexpr(12.0)
"""Exponent to which the largest value of a row is brought in float16, whose largest number is below 2^16."""

_COLUMNS = 64
"""Columns that a program of `column_sums` adds up."""

_ROWS = 32
"""Rows that it looks at together."""

PARTIALS = 32
"""Parts into which `column_sums` divides the rows, at most."""


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
        tl.store(target + column, values.to(made.dtype.element_ty), mask=inside & (column < WIDE))


@triton.jit
def _narrow(
    tile, matrix, factors, count, row_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Copies ROWS rows of a matrix in float16, each times a power of two that is written to ``factors``."""
    given, made = matrix
    at = tile * ROWS + tl.arange(0, ROWS)
    inside = (at < count)[:, None]
    source = given + at.to(tl.int64)[:, None] * row_stride
    largest = tl.zeros((ROWS,), tl.float32)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        values = tl.load(source + column, mask=inside & (column < WIDTH), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(values), 1))
    factor = power_of_two(largest, _EXPONENT)
    tl.store(factors + at, factor, mask=at < count)
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        values = tl.load(source + column, mask=inside & (column < WIDTH), other=0.0).to(tl.float32)
        target = made + at.to(tl.int64)[:, None] * WIDTH + column
        tl.store(target, narrowed(values, factor[:, None]), mask=inside & (column < WIDTH))


@triton.jit(
    do_not_specialize=["steps", "batch", "zero_count", "weight_first", "recurrent_first", "rest_first"]
)
def _prepare(inputs, rows, weight, wide_weight, recurrent, cast_recurrent, factors, bias, other_bias, made_bias, zeros,
             lengths, steps, batch, zero_count, weight_first, recurrent_first, rest_first, step, row, weight_row,
             recurrent_row,
             WIDTH: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, READS: tl.constexpr, PADDED: tl.constexpr,
             WEIGHT: tl.constexpr, RECURRENT: tl.constexpr, NARROW: tl.constexpr, BIASES: tl.constexpr,
             TILE: tl.constexpr,
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
            if NARROW:
                _narrow(
                    program - recurrent_first,
                    (recurrent, cast_recurrent),
                    factors,
                    4 * H,
                    recurrent_row,
                    H,
                    TILE // H_BLOCK,
                    H_BLOCK,
                )
            else:
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
    narrows: bool,
    biases: int,
    zeros: int,
    types: tuple[torch.dtype, ...],
) -> tuple[Launch, int, int, int, int]:
    """Returns a launch that makes what a layer's recurrence and products read, its programs, and three more numbers.

    These are the first program for input weights, for recurrent weights, and for biases with zeros. The launch takes
    the tensors inputs (T, B, I) and rows (T B, I'), to which the inputs are copied with zeros in additional columns;
    input weights (4H, I) and (4H, I') likewise; recurrent weights (4H, H) and (4H, H), and the powers of two (4H,) by
    which the rows of the second are multiplied; two biases and their sum, (4H,) each; an int32 workspace, whose
    beginning becomes zero; and lengths (B,). Any tensor stands for one that is not read. Its integers are T, B, the
    number of zeros and the three numbers; then come the strides of step and row of the inputs, and of both weights.

    Args:
        shape: T, B and I, or None to copy no inputs.
        padded: True if inputs from the lengths on are replaced by zeros.
        width, wide: columns of inputs and input weights before and after they are widened.
        hidden: H.
        casts: True each if the input weights and the recurrent weights are copied.
        narrows: True if the recurrent weights become float16 with a factor for each row, so that they fit its range.
        biases: the number of biases.
        zeros: the number of zeros.
        types: of the tensors, in this order.
    """
    wide_block = min(1024, triton.next_power_of_2(max(wide, 1)))
    hidden_block = min(1024, triton.next_power_of_2(hidden))
    weight_first = 0 if shape is None else triton.cdiv(shape[0] * shape[1], _TILE // wide_block)
    recurrent_first = weight_first + (triton.cdiv(4 * hidden, _TILE // wide_block) if casts[0] else 0)
    rest_first = recurrent_first + (triton.cdiv(4 * hidden, _TILE // hidden_block) if casts[1] else 0)
    programs = rest_first + triton.cdiv(max(zeros, 4 * hidden if biases else 0), _TILE)
    launch = launch_of(
        _prepare, *types, WIDTH=width, WIDE=wide, H=hidden, READS=shape is not None, PADDED=padded, WEIGHT=casts[0],
        RECURRENT=casts[1], NARROW=narrows, BIASES=biases, TILE=_TILE, WIDE_BLOCK=wide_block, H_BLOCK=hidden_block,
        num_warps=4,
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
