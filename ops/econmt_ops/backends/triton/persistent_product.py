"""Product with weights that stay on chip, of the rows that the programs of a persistent kernel exchange.

A program keeps M rows of weights, of K columns, and multiplies ROWS rows of K values by them at every step. Tensor
cores need tiles of 64 rows or more. If M is smaller, the sum over K is split into SPLIT parts that become rows of one
product: of its (SPLIT M, SPLIT ROWS) results only those that pair a part's values with the same part's weights are
used, and summed; the others use units that would otherwise idle. A part is multiplied in CHUNKS chunks of CHUNK
columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(largest, exponent):
    """Returns the power of two that brings values up to ``largest`` to at most 2^exponent; 0 counts as 2^-110."""
    bounded = tl.minimum(tl.maximum(largest, 7.7e-34), 1.3e33)
    # The tensor stands first: a constant minus a tensor is a constant in the interpreter of Triton 3.7.
    return tl.exp2(-tl.ceil(tl.log2(bounded)) + exponent)


@triton.jit
def narrowed(values, factor):
    """Returns float32 values times a power of two in float16; what overflows becomes infinite."""
    return (values * factor).to(tl.float16)


@triton.jit
def weight_rows(M: tl.constexpr, SPLIT: tl.constexpr):
    """Returns, for the SPLIT M rows of a weight tile, the index of the output (of M) and the part of the columns.

    Parts alternate every eight rows, so that a thread holds two rows of an output, in the row order of tensor core
    fragments.
    """
    row = tl.arange(0, SPLIT * M)
    if SPLIT == 1:
        return row, row * 0
    else:
        return row % (2 * M) // 16 * 8 + row % 8, row // (2 * M) * 2 + row // 8 % 2


@triton.jit
def load_weights(matrix, row_offset, column_stride, part, live, K: tl.constexpr, SPLIT: tl.constexpr,
                 CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Loads the program's share of the weights, one tile per chunk; zero beyond the units and beyond K."""
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        column = (chunk * SPLIT + part)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        mask = live[:, None] & (column < K)
        tile = tl.load(matrix + row_offset[:, None] + column * column_stride, mask=mask, other=0.0)
        tiles = tiles + (tile.to(tl.float32) if UP else tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _load_exchanged(source, column, there, chunk: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr,
                    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Loads a chunk written by other programs directly from L2, whose bandwidth bounds large layers.

    Without MASKED, rows that do not exist load garbage, which only reaches unused rows of the product.
    """
    ahead: tl.constexpr = chunk * SPLIT * CHUNK
    WHOLE: tl.constexpr = K == CHUNKS * SPLIT * CHUNK
    if MASKED and WHOLE:
        tile = tl.load(source + ahead, mask=there, other=0.0, cache_modifier=".cg")
    elif MASKED:
        tile = tl.load(source + ahead, mask=there & (column + ahead < K), other=0.0, cache_modifier=".cg")
    elif WHOLE:
        tile = tl.load(source + ahead, cache_modifier=".cg")
    else:
        tile = tl.load(source + ahead, mask=column + ahead < K, other=0.0, cache_modifier=".cg")
    return tile.to(tl.float32) if UP else tile


@triton.jit
def _fold(product, M: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """Sums the products of parts with their own weights: (SPLIT M, SPLIT ROWS) -> (M, ROWS)."""
    if SPLIT == 4:
        parts = tl.reshape(product, (2, 2 * M, 2, 2 * ROWS))
        first, second = tl.split(tl.permute(parts, (1, 3, 2, 0)))
        wanted, _ = tl.split(first)
        _, added = tl.split(second)
        product = wanted + added
    if SPLIT > 1:
        parts = tl.reshape(product, (M // 8, 2, 8, 2, ROWS))
        first, second = tl.split(tl.permute(parts, (0, 2, 4, 3, 1)))
        wanted, _ = tl.split(first)
        _, added = tl.split(second)
        product = tl.reshape(wanted + added, (M, ROWS))
    return product


@triton.jit
def product(exchanged, there, weights, K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
             CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr,
             ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Returns the exchanged rows times the weights of this program: (ROWS, M) in float32. The next chunk is prefetched.

    ``exchanged`` (SPLIT ROWS,): pointers to the rows. ``there`` (SPLIT ROWS,): True for rows that exist; with MASKED
    the others are not read.
    """
    there = there[:, None]
    column = (tl.arange(0, SPLIT * ROWS) // ROWS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    source = exchanged[:, None] + column
    tiles = (_load_exchanged(source, column, there, 0, K, SPLIT, CHUNK, CHUNKS, MASKED, UP),)
    if ROWS_FIRST:
        total = tl.zeros((SPLIT * ROWS, SPLIT * M), tl.float32)
    else:
        total = tl.zeros((SPLIT * M, SPLIT * ROWS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk + 1 < CHUNKS:
            tiles = tiles + (
                _load_exchanged(source, column, there, chunk + 1, K, SPLIT, CHUNK, CHUNKS, MASKED, UP),
            )  # type: ignore[assignment]
        if ROWS_FIRST:
            total += tl.dot(tiles[chunk], tl.trans(weights[chunk]), input_precision=PRECISION)
        else:
            total += tl.dot(weights[chunk], tl.trans(tiles[chunk]), input_precision=PRECISION)
    return tl.trans(_fold(tl.trans(total) if ROWS_FIRST else total, M, ROWS, SPLIT))
