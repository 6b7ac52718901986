"""The recurrence of an LSTM layer in one launch, forward and backward: all steps, the weights staying on the chip.

A program owns some units (their four gates) of some rows of the batch. It loads its part of the recurrent matrix once
and keeps cell states in registers. At each step it needs what all programs of its rows made the step before: h in the
forward pass, the gates' gradients in the backward pass; that goes through the L2 cache (see `exchange`). Diamos et al.
2016, "Persistent RNNs: stashing recurrent weights on-chip".

Shapes: D directions, T steps, B rows, H units. The order of gates is i, f, g, o and nothing is laid out anew: sums and
gradients of the gates are (D, T, B, 4H), h is (T, B, D H). A walk counts its steps from 0; at step s a row stands at
position s, or, walking backwards, at its length - 1 - s. At steps past its length a row keeps its state, and writes
zeros where its padding is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton.exchange import COUNTER_STRIDE, SPINS, arrive, wait


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _row_lengths(lengths, rows, B, T, HAS_LENGTHS: tl.constexpr):
    """The length of each row; 0 of those past the batch."""
    if HAS_LENGTHS:
        return tl.load(lengths + rows, mask=rows < B, other=0).to(tl.int32)
    else:
        return tl.where(rows < B, T, 0)


@triton.jit
def _positions(step, length, backwards):
    """Where rows of these lengths stand at a step of the walk; padding is passed from its first position on."""
    return tl.where((backwards != 0) & (step < length), length - 1 - step, step)


@triton.jit
def _slots(step, length, row, backwards, T, B, direction, RING: tl.constexpr):
    """The rows of the exchanged tensor that hold a step: those of positions, or of a ring of two steps."""
    if RING:
        return ((direction * 2 + step % 2) * B + row).to(tl.int64)
    else:
        return _positions(step, length, backwards).to(tl.int64) * B + row


@triton.jit
def _tile_rows(group, B, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """Which row of the batch each of the SPLIT ROWS rows of an exchanged tile belongs to; one that there is."""
    return tl.minimum(group * ROWS + tl.arange(0, SPLIT * ROWS) % ROWS, B - 1)


@triton.jit
def _weight_rows(M: tl.constexpr, SPLIT: tl.constexpr):
    """Of the SPLIT M rows of a weight tile: which of its M outputs it is, and which part of the columns it has.

    Parts alternate every eight rows, so that a thread has two of an output, as matrix units deal rows out.
    """
    row = tl.arange(0, SPLIT * M)
    if SPLIT == 1:
        return row, row * 0
    else:
        return row % (2 * M) // 16 * 8 + row % 8, row // (2 * M) * 2 + row // 8 % 2


@triton.jit
def _load_weights(matrix, row_offset, column_stride, part, live, K: tl.constexpr, SPLIT: tl.constexpr,
                  CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """The program's share of the weights, one tile a chunk; zero past the units and past K."""
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        column = (chunk * SPLIT + part)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        mask = live[:, None] & (column < K)
        tile = tl.load(matrix + row_offset[:, None] + column * column_stride, mask=mask, other=0.0)
        tiles = tiles + (tile.to(tl.float32) if UP else tile,)
    return tiles


@triton.jit
def _load_exchanged(source, column, chunk: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
                    CHUNKS: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """A chunk of what the other programs wrote, straight from L2.

    No row is left out: what the others did not write is garbage in rows of the product that nobody reads.
    """
    ahead: tl.constexpr = chunk * SPLIT * CHUNK
    if K == CHUNKS * SPLIT * CHUNK:
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
def _product(exchange, slot, weights, K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
             CHUNK: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr, ROWS_FIRST: tl.constexpr,
             PRECISION: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """What was exchanged times the weights kept here: (ROWS, M) in float32. AHEAD chunks are on their way at once."""
    column = (tl.arange(0, SPLIT * ROWS) // ROWS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    source = exchange + slot[:, None] + column
    tiles = ()
    for chunk in tl.static_range(AHEAD):
        tiles = tiles + (_load_exchanged(source, column, chunk, K, SPLIT, CHUNK, CHUNKS, UP),)
    if ROWS_FIRST:
        total = tl.zeros((SPLIT * ROWS, SPLIT * M), tl.float32)
    else:
        total = tl.zeros((SPLIT * M, SPLIT * ROWS), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk + AHEAD < CHUNKS:
            tiles = tiles + (_load_exchanged(source, column, chunk + AHEAD, K, SPLIT, CHUNK, CHUNKS, UP),)
        if ROWS_FIRST:
            total += tl.dot(tiles[chunk], tl.trans(weights[chunk]), input_precision=PRECISION)
        else:
            total += tl.dot(weights[chunk], tl.trans(tiles[chunk]), input_precision=PRECISION)
    return tl.trans(_fold(tl.trans(total) if ROWS_FIRST else total, M, ROWS, SPLIT))


@triton.jit(do_not_specialize=["T", "B", "begin", "end", "first_direction", "first_group", "groups"])
def lstm_forward(sums, recurrent, exchange, outputs, cells, state_h, state_c, lengths, counters,
                 T, B, begin, end, first_direction, first_group, groups,
                 D: tl.constexpr, H: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
                 CHUNK: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr, ROWS_FIRST: tl.constexpr,
                 BACKWARDS: tl.constexpr, HAS_LENGTHS: tl.constexpr, RING: tl.constexpr, KEEP_CELLS: tl.constexpr, KEEP_SUMS: tl.constexpr, PRECISION: tl.constexpr,
                 UP: tl.constexpr, WAIT: tl.constexpr):  # fmt: skip
    """Steps begin to end of the walk.

    Args:
        sums: (D, T, B, 4H), the inputs' share of the gates; become the sums with KEEP_SUMS.
        recurrent: (D, 4H, H).
        exchange: with RING (D, 2, B, H), h of two steps; otherwise the outputs.
        outputs: (T, B, D H), h at its position, zero in the padding.
        cells: (D, T, B, H), c before the step at each position, is written with KEEP_CELLS.
        state_h, state_c: (D, B, H), the state before step ``begin``; become that after the last.
        lengths: (B,), read with HAS_LENGTHS.
        counters: one a direction and group of rows, zero.
        first_direction, first_group, groups: the launch serves these directions, and so many groups of ROWS rows.
        SPLIT: 2 or 4 parts of a product's sum are rows of their own, and the wanted part of the product is summed after
            it: that fills matrix units that want 64 rows. CHUNK, CHUNKS: how much of a part's sum is made at once.
        ROWS_FIRST: the rows of the batch are the rows of the product, otherwise the units are.
        BACKWARDS: bit d says that direction d walks backwards.
        UP: products in float32, for the interpreter, which multiplies bfloat16 wrongly.
        WAIT: programs wait for each other; otherwise a launch is one step.
    """
    PARTS: tl.constexpr = (H + UNITS - 1) // UNITS
    program = tl.program_id(0)
    part = program % PARTS
    group = first_group + program // PARTS % groups
    direction = first_direction + program // (PARTS * groups)
    backwards = (BACKWARDS >> direction) & 1
    counter = counters + (direction * tl.cdiv(B, ROWS) + group) * COUNTER_STRIDE

    owner, chunk_part = _weight_rows(4 * UNITS, SPLIT)  # the four gates of a unit lie side by side
    matrix_row = (direction * 4 + owner % 4) * H + part * UNITS + owner // 4
    live = part * UNITS + owner // 4 < H
    weights = _load_weights(recurrent, matrix_row * H, 1, chunk_part, live, H, SPLIT, CHUNK, CHUNKS, UP)

    row = group * ROWS + tl.arange(0, ROWS)
    unit = part * UNITS + tl.arange(0, UNITS)
    length = _row_lengths(lengths, row, B, T, HAS_LENGTHS)
    owned = (row < B)[:, None] & (unit < H)[None, :]
    tile_row = _tile_rows(group, B, ROWS, SPLIT)
    tile_length = _row_lengths(lengths, tile_row, B, T, HAS_LENGTHS)
    width: tl.constexpr = H if RING else D * H
    tile_begin = 0 if RING else direction * H
    state = (direction * B + row)[:, None] * H + unit[None, :]
    h = tl.load(state_h + state, mask=owned, other=0.0).to(tl.float32)
    c = tl.load(state_c + state, mask=owned, other=0.0)

    spins = tl.full((), SPINS, tl.int32)
    for number in range(end - begin if WAIT else 1):
        step = begin + number
        active = (step < length)[:, None] & owned
        position = _positions(step, length, backwards)
        place = ((direction * T + position).to(tl.int64) * B + row)[:, None]
        gates = sums + place * (4 * H) + unit[None, :]
        sum_i = tl.load(gates, mask=active, other=0.0).to(tl.float32)
        sum_f = tl.load(gates + H, mask=active, other=0.0).to(tl.float32)
        sum_g = tl.load(gates + 2 * H, mask=active, other=0.0).to(tl.float32)
        sum_o = tl.load(gates + 3 * H, mask=active, other=0.0).to(tl.float32)
        if WAIT:
            spins = wait(counter, number * PARTS, spins)
        last = tl.maximum(step - 1, 0)
        slot = _slots(last, tile_length, tile_row, backwards, T, B, direction, RING) * width + tile_begin
        product = _product(exchange, slot, weights, H, 4 * UNITS, ROWS, SPLIT, CHUNK, CHUNKS, AHEAD, ROWS_FIRST,
                           PRECISION, UP)  # fmt: skip
        product = tl.where(step > 0, product, 0.0)
        even, odd = tl.split(tl.reshape(product, (ROWS, UNITS, 2, 2)))
        share_i, share_g = tl.split(even)
        share_f, share_o = tl.split(odd)
        sum_i += share_i
        sum_f += share_f
        sum_g += share_g
        sum_o += share_o
        before = c
        after = tl.sigmoid(sum_f) * c + tl.sigmoid(sum_i) * _tanh(sum_g)
        made = tl.sigmoid(sum_o) * _tanh(after)
        if WAIT:
            made += tl.where(spins == 0, float("nan"), 0.0)
        c = tl.where(active, after, c)
        h = tl.where(active, made, h)
        output = tl.where(active, made, 0.0)
        written = (
            outputs + (position.to(tl.int64) * B + row)[:, None] * (D * H) + direction * H + unit[None, :]
        )
        if RING:
            slot = _slots(step, length, row, backwards, T, B, direction, RING)
            given = output.to(exchange.dtype.element_ty)
            tl.store(exchange + slot[:, None] * H + unit[None, :], given, mask=owned)
        else:
            tl.store(written, output.to(outputs.dtype.element_ty), mask=owned)
        if WAIT:
            arrive(counter)
        if RING:
            tl.store(written, output.to(outputs.dtype.element_ty), mask=owned)
        if KEEP_CELLS:
            tl.store(cells + place * H + unit[None, :], before, mask=active)
        if KEEP_SUMS:
            kind = sums.dtype.element_ty
            tl.store(gates, sum_i.to(kind), mask=active)
            tl.store(gates + H, sum_f.to(kind), mask=active)
            tl.store(gates + 2 * H, sum_g.to(kind), mask=active)
            tl.store(gates + 3 * H, sum_o.to(kind), mask=active)
    tl.store(state_h + state, h.to(state_h.dtype.element_ty), mask=owned)
    tl.store(state_c + state, c, mask=owned)


@triton.jit(do_not_specialize=["T", "B", "begin", "end", "first_direction", "first_group", "groups"])
def lstm_backward(sums, recurrent, exchange, scale, cells, doutputs, dsums, last_dh, state_dc, lengths, counters,
                  T, B, begin, end, first_direction, first_group, groups, doutputs_step, doutputs_row,
                  D: tl.constexpr, H: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
                  CHUNK: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr, ROWS_FIRST: tl.constexpr, BACKWARDS: tl.constexpr,
                  HAS_LENGTHS: tl.constexpr, RING: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr,
                  WAIT: tl.constexpr):  # fmt: skip
    """Steps end - 1 down to begin of the walk.

    Args:
        sums: (D, T, B, 4H), the gates before their nonlinearities.
        recurrent: (D, 4H, H).
        exchange: with RING (D, 2, B, 4H), ``dsums`` of two steps times ``scale``; otherwise ``dsums``.
        scale: one number, read with RING: a power of two that keeps float16 gradients from vanishing.
        cells: (D, T, B, H), c before the step at each position.
        doutputs: (T, B, D H), the gradient of the outputs, with these strides of steps and rows.
        dsums: (D, T, B, 4H) is written, zero in the padding.
        last_dh: (D, B, H), the gradient of the last h.
        state_dc: (D, B, H), the gradient of c after step ``end`` - 1; becomes that before step ``begin``.
        Others: as in `lstm_forward`.
    """
    PARTS: tl.constexpr = (H + UNITS - 1) // UNITS
    program = tl.program_id(0)
    part = program % PARTS
    group = first_group + program // PARTS % groups
    direction = first_direction + program // (PARTS * groups)
    backwards = (BACKWARDS >> direction) & 1
    counter = counters + (direction * tl.cdiv(B, ROWS) + group) * COUNTER_STRIDE

    owner, chunk_part = _weight_rows(UNITS, SPLIT)
    weight_unit = part * UNITS + owner
    matrix = recurrent + direction * 4 * H * H
    weights = _load_weights(
        matrix, weight_unit, H, chunk_part, weight_unit < H, 4 * H, SPLIT, CHUNK, CHUNKS, UP
    )

    row = group * ROWS + tl.arange(0, ROWS)
    unit = part * UNITS + tl.arange(0, UNITS)
    length = _row_lengths(lengths, row, B, T, HAS_LENGTHS)
    owned = (row < B)[:, None] & (unit < H)[None, :]
    tile_row = _tile_rows(group, B, ROWS, SPLIT)
    tile_length = _row_lengths(lengths, tile_row, B, T, HAS_LENGTHS)
    tile_begin = 0
    if not RING:
        tile_begin = direction.to(tl.int64) * T * B * (4 * H)
    state = (direction * B + row)[:, None] * H + unit[None, :]
    dh_last = tl.load(last_dh + state, mask=owned, other=0.0).to(tl.float32)
    dc = tl.load(state_dc + state, mask=owned, other=0.0)
    factor = 1.0
    if RING:
        factor = tl.load(scale)

    spins = tl.full((), SPINS, tl.int32)
    for number in range(end - begin if WAIT else 1):
        step = end - 1 - number
        active = (step < length)[:, None] & owned
        position = _positions(step, length, backwards)
        place = ((direction * T + position).to(tl.int64) * B + row)[:, None]
        gates = sums + place * (4 * H) + unit[None, :]
        i = tl.sigmoid(tl.load(gates, mask=active, other=0.0).to(tl.float32))
        f = tl.sigmoid(tl.load(gates + H, mask=active, other=0.0).to(tl.float32))
        g = _tanh(tl.load(gates + 2 * H, mask=active, other=0.0).to(tl.float32))
        o = tl.sigmoid(tl.load(gates + 3 * H, mask=active, other=0.0).to(tl.float32))
        before = tl.load(cells + place * H + unit[None, :], mask=active, other=0.0)
        incoming = (position.to(tl.int64) * doutputs_step + row * doutputs_row)[:, None] + direction * H
        dh = tl.load(doutputs + incoming + unit[None, :], mask=active, other=0.0).to(tl.float32)
        squashed = _tanh(f * before + i * g)
        if WAIT:
            spins = wait(counter, number * PARTS, spins)
        after = tl.minimum(step + 1, T - 1)
        slot = _slots(after, tile_length, tile_row, backwards, T, B, direction, RING) * (4 * H) + tile_begin
        product = _product(exchange, slot, weights, 4 * H, UNITS, ROWS, SPLIT, CHUNK, CHUNKS, AHEAD, ROWS_FIRST,
                           PRECISION, UP)  # fmt: skip
        # Taken apart and put together so that units lie in threads as memory wants them; else every load is moved.
        even, odd = tl.split(tl.reshape(product, (ROWS, UNITS // 2, 2)))
        product = tl.reshape(tl.join(even, odd), (ROWS, UNITS))
        dh += tl.where((step + 1 == length)[:, None], dh_last, product / factor if RING else product)
        if WAIT:
            dh += tl.where(spins == 0, float("nan"), 0.0)
        total = dc + dh * o * (1 - squashed * squashed)
        d_i = tl.where(active, total * g * i * (1 - i), 0.0)
        d_f = tl.where(active, total * before * f * (1 - f), 0.0)
        d_g = tl.where(active, total * i * (1 - g * g), 0.0)
        d_o = tl.where(active, dh * squashed * o * (1 - o), 0.0)
        dc = tl.where(active, total * f, dc)
        if RING:
            slot = _slots(step, length, row, backwards, T, B, direction, RING)
            _store_gates(exchange + slot[:, None] * (4 * H) + unit[None, :], d_i * factor, d_f * factor,
                         d_g * factor, d_o * factor, owned, H)  # fmt: skip
        else:
            _store_gates(dsums + place * (4 * H) + unit[None, :], d_i, d_f, d_g, d_o, owned, H)
        if WAIT:
            arrive(counter)
        if RING:
            _store_gates(dsums + place * (4 * H) + unit[None, :], d_i, d_f, d_g, d_o, owned, H)
    tl.store(state_dc + state, dc, mask=owned)


@triton.jit
def _store_gates(where, i, f, g, o, mask, H: tl.constexpr):
    kind = where.dtype.element_ty
    tl.store(where, i.to(kind), mask=mask)
    tl.store(where + H, f.to(kind), mask=mask)
    tl.store(where + 2 * H, g.to(kind), mask=mask)
    tl.store(where + 3 * H, o.to(kind), mask=mask)


@triton.jit(do_not_specialize=["T", "B"])
def lstm_cells(sums, first_c, cells, lengths, T, B, D: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
               UNITS: tl.constexpr, BACKWARDS: tl.constexpr, HAS_LENGTHS: tl.constexpr):  # fmt: skip
    """Makes the cell states again from the gates' sums: no program needs another's.

    Args:
        sums: (D, T, B, 4H). first_c: (D, B, H).
        cells: (D, T, B, H) is written, c before the step at each position; padding is left as it is.
        Others: as in `lstm_forward`.
    """
    PARTS: tl.constexpr = (H + UNITS - 1) // UNITS
    program = tl.program_id(0)
    groups = tl.cdiv(B, ROWS)
    direction = program // (PARTS * groups)
    backwards = (BACKWARDS >> direction) & 1
    row = program // PARTS % groups * ROWS + tl.arange(0, ROWS)
    unit = program % PARTS * UNITS + tl.arange(0, UNITS)
    length = _row_lengths(lengths, row, B, T, HAS_LENGTHS)
    owned = (row < B)[:, None] & (unit < H)[None, :]
    c = tl.load(first_c + (direction * B + row)[:, None] * H + unit[None, :], mask=owned, other=0.0)
    for step in tl.range(0, T, loop_unroll_factor=4):
        active = (step < length)[:, None] & owned
        position = _positions(step, length, backwards)
        place = ((direction * T + position).to(tl.int64) * B + row)[:, None]
        gates = sums + place * (4 * H) + unit[None, :]
        i = tl.sigmoid(tl.load(gates, mask=active, other=0.0).to(tl.float32))
        f = tl.sigmoid(tl.load(gates + H, mask=active, other=0.0).to(tl.float32))
        g = _tanh(tl.load(gates + 2 * H, mask=active, other=0.0).to(tl.float32))
        tl.store(cells + place * H + unit[None, :], c, mask=active)
        c = f * c + i * g
