"""A product whose weights stay on the chip, with what the programs of a launch exchange.

A program keeps M rows of weights, of K columns, and multiplies ROWS rows of K values by them at every step. Matrix
units want 64 rows or more. Where M has fewer, the sum over K is made in SPLIT parts that are rows of one product: of
(SPLIT M, SPLIT ROWS) results only those of a part's values with the same part's weights are wanted, and summed; the
others cost nothing that was not idle. CHUNKS chunks of CHUNK columns a part are multiplied one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_rows(M: tl.constexpr, SPLIT: tl.constexpr):
    """Of the SPLIT M rows of a weight tile: which of its M outputs it is, and which part of the columns it has.

    Parts alternate every eight rows, so that a thread has two of an output, as matrix units deal rows out.
    """
    row = tl.arange(0, SPLIT * M)
    if SPLIT == 1:
        return row, row * 0
    else:
        return row % (2 * M) // 16 * 8 + row % 8, row // (2 * M) * 2 + row // 8 % 2


@triton.jit
def load_weights(matrix, row_offset, column_stride, part, live, K: tl.constexpr, SPLIT: tl.constexpr,
                  CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """The program's share of the weights, one tile a chunk; zero past the units and past K."""
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
    """A chunk of what the other programs wrote, straight from L2, which is what bounds large layers.

    Rows that are read though they are not there are garbage in rows of the product that nobody reads.
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
             CHUNK: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr,
             ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """What was exchanged times the weights kept here: (ROWS, M) in float32. AHEAD chunks are on their way at once.

    ``exchanged`` (SPLIT ROWS,): where its rows begin. ``there`` (SPLIT ROWS,): which of them are there; with MASKED the
    others are not read.
    """
    there = there[:, None]
    column = (tl.arange(0, SPLIT * ROWS) // ROWS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    source = exchanged[:, None] + column
    tiles = ()
    for chunk in tl.static_range(AHEAD):
        tiles = tiles + (_load_exchanged(source, column, there, chunk, K, SPLIT, CHUNK, CHUNKS, MASKED, UP),)  # type: ignore[assignment]
    if ROWS_FIRST:
        total = tl.zeros((SPLIT * ROWS, SPLIT * M), tl.float32)
    else:
        total = tl.zeros((SPLIT * M, SPLIT * ROWS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk + AHEAD < CHUNKS:
            tiles = tiles + (
                _load_exchanged(source, column, there, chunk + AHEAD, K, SPLIT, CHUNK, CHUNKS, MASKED, UP),
            )  # type: ignore[assignment]
        if ROWS_FIRST:
            total += tl.dot(tiles[chunk], tl.trans(weights[chunk]), input_precision=PRECISION)
        else:
            total += tl.dot(weights[chunk], tl.trans(tiles[chunk]), input_precision=PRECISION)
    return tl.trans(_fold(tl.trans(total) if ROWS_FIRST else total, M, ROWS, SPLIT))
