"""All gradients of a small LSTM layer from those of its gates' sums, in one launch.

cuBLAS takes a launch for each of the three products, the bias one more. Each takes the host 10 to 20 us, and without
a CUDA graph the GPU waits for the host where a layer is small.

Sizes: T steps, B rows, I inputs, I' their width in memory, H units.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from econmt_ops.backends.triton import interpreted
from econmt_ops.backends.triton.launching import Launch, launch_of

_TILE = 64
"""Rows and columns of a program's part of a gradient."""

_MOST_ROWS = 4096
_MOST_PRODUCTS = 1 << 30
"""Largest T B, over which a program adds up one after the other, and number of multiplications of a small layer."""


def is_small(rows: int, size: int, hidden: int) -> bool:
    """Returns True if a layer's gradients are computed in one launch; ``rows``: T B."""
    return rows <= _MOST_ROWS and rows * 4 * hidden * (2 * size + hidden) <= _MOST_PRODUCTS


@triton.jit
def _add_product(total, left, right, PRECISION: tl.constexpr, UP: tl.constexpr):
    if UP:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _weight_tile(tile, dsums, other, gradient, bias, resets, rows, dsums_first, other_first, WIDTH: tl.constexpr,
                 WIDE: tl.constexpr, GATES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr,
                 MASKED: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Writes a tile of the product (4H, WIDTH) of dsums (rows, 4H), transposed, and other (rows, WIDE); the bias too.

    The rows of both begin at ``dsums_first`` and ``other_first``. MASKED: a row of ``other`` counts as zero where
    ``resets`` are True one step later.
    """
    COLUMNS: tl.constexpr = (WIDTH + TILE - 1) // TILE
    gate = tile // COLUMNS * TILE + tl.arange(0, TILE)
    column = tile % COLUMNS * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    sums = tl.zeros((TILE,), tl.float32)
    for first in range(0, rows, STEP):
        row = first + tl.arange(0, STEP)
        read = row < rows
        left = tl.load(
            dsums + (dsums_first + row)[:, None] * GATES + gate[None, :],
            mask=read[:, None] & (gate < GATES)[None, :],
            other=0.0,
        )
        kept = read
        if MASKED:
            kept = read & (tl.load(resets + row, mask=read, other=1) == 0)
        right = tl.load(
            other + (other_first + row)[:, None] * WIDE + column[None, :],
            mask=kept[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        total = _add_product(total, tl.trans(left), right, PRECISION, UP)
        if BIAS:
            sums += tl.sum(left.to(tl.float32), 0)
    to = gradient + gate[:, None] * WIDTH + column[None, :]
    tl.store(
        to, total.to(gradient.dtype.element_ty), mask=(gate < GATES)[:, None] & (column < WIDTH)[None, :]
    )
    if BIAS:  # noqa: SIM102  a compile-time condition
        if tile % COLUMNS == 0:
            tl.store(bias + gate, sums.to(bias.dtype.element_ty), mask=gate < GATES)


@triton.jit
def _input_tile(tile, dsums, matrix, dinputs, rows, WIDTH: tl.constexpr, WIDE: tl.constexpr, GATES: tl.constexpr,
                TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Writes a tile of dinputs (rows, WIDTH), the product of dsums (rows, 4H) and matrix (4H, WIDE)."""
    COLUMNS: tl.constexpr = (WIDTH + TILE - 1) // TILE
    row = tile // COLUMNS * TILE + tl.arange(0, TILE)
    column = tile % COLUMNS * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, GATES, STEP):
        gate = first + tl.arange(0, STEP)
        left = tl.load(
            dsums + row[:, None] * GATES + gate[None, :],
            mask=(row < rows)[:, None] & (gate < GATES)[None, :],
            other=0.0,
        )
        right = tl.load(
            matrix + gate[:, None] * WIDE + column[None, :],
            mask=(gate < GATES)[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )
        total = _add_product(total, left, right, PRECISION, UP)
    to = dinputs + row[:, None] * WIDTH + column[None, :]
    tl.store(to, total.to(dinputs.dtype.element_ty), mask=(row < rows)[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["rows", "batch", "recurrent_first", "inputs_first"])
def _layer_gradients(dsums, inputs, states, resets, matrix, dinputs, dmatrix, drecurrent, dbias, rows, batch,
                     recurrent_first, inputs_first, SIZE: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr,
                     INPUTS: tl.constexpr, HAS_RESETS: tl.constexpr, BACKWARDS: tl.constexpr, TILE: tl.constexpr,
                     STEP: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Does the work of `gradients_launch`: each program a tile of one gradient."""
    program = tl.program_id(0)
    if program < recurrent_first:
        _weight_tile(program, dsums, inputs, dmatrix, dbias, resets, rows, 0, 0, SIZE, WIDE, 4 * H, TILE, STEP, True,
                     False, PRECISION, UP)  # fmt: skip
    if (program >= recurrent_first) & (program < inputs_first):
        # A step's gates and h of the step before.
        dsums_first = 0 if BACKWARDS else batch
        states_first = batch if BACKWARDS else 0
        _weight_tile(program - recurrent_first, dsums, states, drecurrent, dbias, resets + batch, rows - batch,
                     dsums_first, states_first, H, H, 4 * H, TILE, STEP, False, HAS_RESETS, PRECISION, UP)  # fmt: skip
    if INPUTS:  # noqa: SIM102
        if program >= inputs_first:
            _input_tile(program - inputs_first, dsums, matrix, dinputs, rows, SIZE, WIDE, 4 * H, TILE, STEP, PRECISION,
                        UP)  # fmt: skip


@functools.cache
def gradients_launch(
    sizes: tuple[int, int, int, int, int],
    types: tuple[torch.dtype, ...],
    backwards: bool,
    has_resets: bool,
    has_inputs: bool,
) -> tuple[Launch, int, tuple[int, ...]]:
    """Returns the launch that computes the gradients of a layer in one direction from a zero state.

    The launch takes the tensors dsums (T B, 4H), inputs (T B, I'), outputs (T B, H), resets (T, B) bool and input
    weights (4H, I'), which are read; and the gradients of the inputs (T B, I), of input weights (4H, I), of recurrent
    weights (4H, H) and of the bias (4H,), which are written. Any tensor stands for one that is not used.

    Args:
        sizes: T B, B, I, I' and H.
        types: of dsums, which are those of all tensors that are read, and of the four gradients.
        backwards: True if the layer walks from the last step to the first.
        has_resets: True if there are resets.
        has_inputs: True if the gradient of the inputs is computed.

    Returns:
        The launch, its programs, and its integers.
    """
    rows, batch, size, wide, hidden = sizes
    exact = types[0] == torch.float32
    launch = launch_of(
        _layer_gradients, *types, SIZE=size, WIDE=wide, H=hidden, INPUTS=has_inputs, HAS_RESETS=has_resets,
        BACKWARDS=backwards, TILE=_TILE, STEP=32 if exact else 64, PRECISION="ieee" if interpreted() else "tf32",
        UP=interpreted() and not exact, num_warps=8, num_stages=3,
    )  # fmt: skip
    columns, gates = triton.cdiv(size, _TILE), triton.cdiv(4 * hidden, _TILE)
    recurrent_first = gates * columns
    inputs_first = recurrent_first + gates * triton.cdiv(hidden, _TILE)
    programs = inputs_first + (triton.cdiv(rows, _TILE) * columns if has_inputs else 0)
    return launch, programs, (rows, batch, recurrent_first, inputs_first)
