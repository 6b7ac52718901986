"""Embedding look-up into another type, and its gradient in a fixed order, without synchronising with the GPU.

PyTorch's gradient sorts eight bytes per id and holds partial sums as large as the looked-up rows. This one sorts two or
four bytes, and one program per word loops over the word's occurrences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Rows that a program adds at once. Most words are rarer; some are hundreds of times as frequent."""

_COLUMNS = 512
_ROW_COLUMNS = 1024


@triton.jit
def embedding_rows(table, ids, rows, width, COLUMNS: tl.constexpr):
    """Writes a tile of columns of one row of rows (N, E): the row of table (V, E) that ids (N,) name."""
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.load(table + tl.load(ids + position) * width + column, mask=column < width)
    tl.store(rows + position * width + column, found.to(rows.dtype.element_ty), mask=column < width)


def look_up(table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows (..., E) of a table (V, E), contiguous, with ids (...), int64, in another type."""
    width = table.shape[1]
    rows = table.new_empty(*ids.shape, width, dtype=dtype)
    if rows.numel():
        columns = min(_ROW_COLUMNS, triton.next_power_of_2(width))
        grid = (ids.numel(), triton.cdiv(width, columns))
        embedding_rows[grid](table, ids.contiguous(), rows, width, COLUMNS=columns)
    return rows


@triton.jit(do_not_specialize=["padding"])
def embedding_sum(
    words, order, incoming, table, positions, width, inner, outer_stride, inner_stride, padding,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the sums of incoming (N, E) per word to table (V, E); words (N,) are sorted, from positions order (N,).

    Row n of incoming lies at n // inner * outer_stride + n % inner * inner_stride. A program handles one sorted
    position, if a word begins there, and a tile of columns.
    """
    begin = tl.program_id(0)
    word = tl.load(words + begin).to(tl.int64)
    before = tl.load(words + begin - 1, mask=begin > 0, other=-1).to(tl.int64)
    if (before != word) & (word != padding):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        count = tl.full((), ROWS, tl.int32)
        while count == ROWS:
            place = begin + tl.arange(0, ROWS)
            found = tl.load(words + place, mask=place < positions, other=-1).to(tl.int64) == word
            row = tl.load(order + place, mask=found, other=0)
            # A division of 32-bit integers takes half the time.
            outer = row.to(tl.int32) // inner
            at = incoming + outer.to(tl.int64) * outer_stride + (row - outer * inner) * inner_stride
            within = found[:, None] & (column < width)[None, :]
            total += tl.load(at[:, None] + column[None, :], mask=within, other=0.0).to(tl.float32)
            count = tl.sum(found.to(tl.int32), 0)
            begin += ROWS
        summed = tl.sum(total, 0).to(table.dtype.element_ty)
        row = table + word * width + column
        tl.store(row, tl.load(row, mask=column < width) + summed, mask=column < width)


def gradient(
    incoming: Tensor, ids: Tensor, words: int, padding: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the gradient (V, E) of a table of a type, None: that of ``incoming``; see `add_gradient`."""
    table = incoming.new_zeros(words, incoming.shape[-1], dtype=dtype)
    add_gradient(table, incoming, ids, padding)
    return table


def add_gradient(table: Tensor, incoming: Tensor, ids: Tensor, padding: int) -> None:
    """Adds the gradient ``incoming`` (..., E) of a look-up to that of its table (V, E), contiguous; of up to 32 bits.

    Each of ids (...), int64, is in [0, V) or ``padding``, an id to ignore: a word, V for ids without one, or -1.
    """
    assert table.is_contiguous()
    words, width = table.shape
    if incoming.stride(-1) != 1 or incoming.dim() > 3:
        incoming = incoming.contiguous()
    if not incoming.is_contiguous() and incoming.dim() == 3:
        inner, strides = incoming.shape[1], incoming.stride()[:2]
    else:
        incoming = incoming.reshape(-1, width)
        inner, strides = len(incoming), (0, incoming.stride(0))
    if incoming.numel():
        short = torch.int16 if words < 1 << 15 else torch.int32
        found, order = ids.flatten().to(short).sort(stable=True)
        columns = min(_COLUMNS, triton.next_power_of_2(width))
        grid = (len(found), triton.cdiv(width, columns))
        embedding_sum[grid](
            found, order, incoming, table, len(found), width, inner, *strides, padding, ROWS=_ROWS, COLUMNS=columns,
        )  # fmt: skip
