"""Persistent kernels of an LSTM layer: one launch runs all steps, forward or backward, with the weights kept on chip.

A program owns some units (their four gates) for some rows of the batch. It loads its part of the recurrent matrix once
and keeps cell states in registers. At each step it needs what all programs of its rows computed in the step before: h
in the forward pass, the gates' gradients in the backward pass; these are exchanged through the L2 cache with a grid
barrier (see `exchange`). Diamos et al. 2016, "Persistent RNNs: stashing recurrent weights on-chip".

Sizes: D directions, T steps, B rows, H units. The gate order is i, f, g, o and no tensor is rearranged: sums and
gradients of the gates are (D, T, B, 4H), h is (T, B, D H). A walk, the run over all steps, counts them from 0; at step
s a row is at position s or, walking backwards, at its length - 1 - s. At steps beyond its length a row keeps its state,
and writes zeros at its padding. With resets (T, B) the state is zero before the steps that are marked or, walking
backwards, that follow a marked position, and no gradient passes there.

With RING, float32 layers exchange float16, which has the mantissa of TF32, in a ring of two steps. Each row of a step
is multiplied by a power of two of its own, so that float16 holds whatever float32 does: its programs tell each other,
at the step before, the largest number from which the row follows (slots, one a direction, step and row).
"""

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton.exchange import COUNTER_STRIDE, SPINS, arrive, wait
from econmt_ops.backends.triton.persistent_product import (
    load_weights,
    narrowed,
    power_of_two,
    product,
    weight_rows,
)
from econmt_ops.backends.triton.pointwise import tanh

_EXPONENT = tl.constexpr(-6.0)
"""Exponent to which a row's largest number so far is brought in float16: the row may grow by 2^22 in a step."""
_UNIT_EXPONENT = tl.constexpr(14.0)
"""Least exponent of the powers of two by which h is multiplied, which never exceeds 1."""
_LEAST = tl.constexpr(-126.0)
"""Least exponent of the powers of two by which gradients are multiplied."""


@triton.jit
def _tanh(x, EXACT: tl.constexpr):
    """Returns tanh x, of which small values keep their digits if EXACT."""
    if EXACT:
        return tanh(x)
    else:
        return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _row_lengths(lengths, rows, there, T, HAS_LENGTHS: tl.constexpr):
    """Returns the length of each row; 0 for rows that do not exist."""
    if HAS_LENGTHS:
        return tl.load(lengths + rows, mask=there, other=0).to(tl.int32)
    else:
        return tl.where(there, T, 0)


@triton.jit
def _rows(lengths, group, span, B, T, ROWS: tl.constexpr, SPLIT: tl.constexpr, HAS_LENGTHS: tl.constexpr):
    """Returns, for a tile's SPLIT ROWS rows, the row of the batch, a mask of rows in this group, and the length.

    Rows beyond the group map to the next group's rows, at distinct addresses, so that no row is read repeatedly; their
    length is 0.
    """
    offset = tl.arange(0, SPLIT * ROWS) % ROWS
    row = tl.minimum(group * span + offset, B - 1)
    there = (offset < span) & (group * span + offset < B)
    return row, there, _row_lengths(lengths, row, there, T, HAS_LENGTHS)


@triton.jit
def _positions(step, length, backwards):
    """Returns the position of rows of these lengths at a step of the walk; padding is visited in ascending order."""
    return tl.where((backwards != 0) & (step < length), length - 1 - step, step)


@triton.jit
def _begins(resets, step, length, row, backwards, B, HAS_RESETS: tl.constexpr):
    """Returns True for rows whose state begins anew at a step of the walk; (1,) where none can."""
    if HAS_RESETS:
        position = _positions(step, length, backwards) + backwards
        inside = (step < length) & (position < length)
        return tl.load(resets + position.to(tl.int64) * B + row, mask=inside, other=0) != 0
    else:
        return tl.full((1,), False, tl.int1)


@triton.jit
def _slots(step, length, row, backwards, B, direction, RING: tl.constexpr):
    """Returns the rows of the exchange tensor that hold a step: its positions, or slots of a ring of two steps."""
    if RING:
        return ((direction * 2 + step % 2) * B + row).to(tl.int64)
    else:
        return _positions(step, length, backwards).to(tl.int64) * B + row


@triton.jit
def _place(first_direction, first_group, groups, PARTS: tl.constexpr):
    """Returns this program's part of the units, group of rows, and direction."""
    program = tl.program_id(0)
    group = first_group + program // PARTS % groups
    return program % PARTS, group, first_direction + program // (PARTS * groups)


@triton.jit
def _given(where, mask, ROWS: tl.constexpr, UNITS: tl.constexpr, GIVEN: tl.constexpr):
    """Loads a state (ROWS, UNITS) in float32; zeros if none is given."""
    if GIVEN:
        return tl.load(where, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros((ROWS, UNITS), tl.float32)


@triton.jit
def _load_gates(where, mask, H: tl.constexpr):
    """Loads four values in float32, one per gate."""
    i = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(where + H, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(where + 2 * H, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(where + 3 * H, mask=mask, other=0.0).to(tl.float32)
    return i, f, g, o


@triton.jit
def _store_gates(where, i, f, g, o, mask, H: tl.constexpr):
    kind = where.dtype.element_ty
    tl.store(where, i.to(kind), mask=mask)
    tl.store(where + H, f.to(kind), mask=mask)
    tl.store(where + 2 * H, g.to(kind), mask=mask)
    tl.store(where + 3 * H, o.to(kind), mask=mask)


@triton.jit
def _parts_of(shares, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Returns the gates' parts (ROWS, UNITS) of a product (ROWS, 4 UNITS); the gates of a unit are adjacent in it."""
    even, odd = tl.split(tl.reshape(shares, (ROWS, UNITS, 2, 2)))
    share_i, share_g = tl.split(even)
    share_f, share_o = tl.split(odd)
    return share_i, share_f, share_g, share_o


@triton.jit
def _slot(slots, step, row, T, B, direction):
    return slots + (direction * (T + 1) + step).to(tl.int64) * B + row


@triton.jit
def _tell_largest(slots, step, row, there, T, B, direction, values):
    """Raises the slots of a step's rows to the largest of the values (ROWS, UNITS), which are not negative."""
    # Floating point numbers without a sign are in the order of their bits; NaN is above all others.
    bits = tl.max(values.to(tl.int32, bitcast=True), 1)
    tl.atomic_max(_slot(slots, step, row, T, B, direction), bits, mask=there, sem="relaxed")


@triton.jit
def _row_factor(slots, step, row, there, T, B, direction, LEAST: tl.constexpr):
    """Returns the powers of two (ROWS, 1) by which the rows of a step are multiplied, at least 2^LEAST."""
    place = _slot(slots, step, row, T, B, direction)
    largest = tl.load(place, mask=there, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
    return tl.maximum(power_of_two(largest, _EXPONENT), tl.exp2(LEAST))[:, None]


@triton.jit
def _inverse_factors(where, mask, H: tl.constexpr):
    """Returns the inverse factors (1, UNITS) of the units' four rows of the recurrent matrix."""
    i = tl.load(where, mask=mask, other=1.0)
    f = tl.load(where + H, mask=mask, other=1.0)
    g = tl.load(where + 2 * H, mask=mask, other=1.0)
    o = tl.load(where + 3 * H, mask=mask, other=1.0)
    return 1 / i[None, :], 1 / f[None, :], 1 / g[None, :], 1 / o[None, :]


@triton.jit
def _poison(spins):
    """Returns zero, or NaN if a wait timed out."""
    return tl.where(spins == 0, float("nan"), 0.0)


@triton.jit(do_not_specialize=["T", "B", "begin", "end", "first_direction", "first_group", "groups", "span",
                               "first_slot"])  # fmt: skip
def lstm_forward(sums, recurrent, exchange, outputs, cells, first_h, first_c, state_h, state_c, lengths, resets,
                 counters, factors, T, B, begin, end, first_direction, first_group, groups, span, first_slot,
                 D: tl.constexpr, H: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
                 CHUNK: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr,
                 ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr,
                 BACKWARDS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_RESETS: tl.constexpr,
                 RING: tl.constexpr, KEEP_CELLS: tl.constexpr, KEEP_SUMS: tl.constexpr):  # fmt: skip
    """Runs steps begin to end of the walk.

    Args:
        sums: (D, T, B, 4H), the inputs' share of the gates; with RING the first step includes the product with the
            initial h. Overwritten by the full sums with KEEP_SUMS.
        recurrent: (D, 4H, H).
        exchange: with RING (D, 2, B, H) float16, h of two steps; otherwise the outputs.
        outputs: (T, B, D H), h at its position, zero in the padding.
        cells: (D, T, B, H), c before the step at each position (in padding, c after the last step), is written with
            KEEP_CELLS.
        first_h, first_c: (D, B, H), the initial state, read with HAS_FIRST; otherwise it is zero. Without RING h has
            the type of the exchange tensor.
        state_h, state_c: (D, B, H) are written, the state after the last step; if ``begin`` is not 0 they hold the
            state before it.
        lengths: (B,), read with HAS_LENGTHS. resets: (T, B), read with HAS_RESETS.
        counters: zeros, one per direction and group of rows. first_slot: where, with RING, the slots begin.
        factors: (D, 4H) float32, by which the rows of ``recurrent`` were multiplied with RING.
        first_direction, first_group, groups: first direction, first group and number of groups of this launch.
        span: rows of a group, at most ROWS; the last group may have fewer. MASKED: only rows of the group are loaded.
        SPLIT, CHUNK, CHUNKS, AHEAD, ROWS_FIRST: see `persistent_product`.
        BACKWARDS: bit d is set if direction d walks backwards.
        UP: products in float32, for the interpreter, which multiplies bfloat16 incorrectly.
        WAIT: True if programs wait at grid barriers; otherwise a launch is one step.
    """
    PARTS: tl.constexpr = (H + UNITS - 1) // UNITS
    EXACT: tl.constexpr = sums.dtype.element_ty == tl.float32
    part, group, direction = _place(first_direction, first_group, groups, PARTS)
    backwards = (BACKWARDS >> direction) & 1
    counter = counters + (direction * tl.cdiv(B, span) + group) * COUNTER_STRIDE

    owner, half = weight_rows(4 * UNITS, SPLIT)  # the four gates of a unit are adjacent
    matrix_row = (direction * 4 + owner % 4) * H + part * UNITS + owner // 4
    live = part * UNITS + owner // 4 < H
    weights = load_weights(recurrent, matrix_row * H, 1, half, live, H, SPLIT, CHUNK, CHUNKS, UP)

    row, there, length = _rows(lengths, group, span, B, T, ROWS, 1, HAS_LENGTHS)
    unit = part * UNITS + tl.arange(0, UNITS)
    owned = there[:, None] & (unit < H)[None, :]
    tile_row, tile_there, tile_length = _rows(lengths, group, span, B, T, ROWS, SPLIT, HAS_LENGTHS)
    width: tl.constexpr = H if RING else D * H
    tile_begin = 0 if RING else direction * H
    state = (direction * B + row)[:, None] * H + unit[None, :]
    h = tl.load(state_h + state, mask=owned & (begin > 0), other=0.0).to(tl.float32)
    c = tl.load(state_c + state, mask=owned & (begin > 0), other=0.0)
    h += _given(first_h + state, owned & (begin == 0), ROWS, UNITS, HAS_FIRST)
    c += _given(first_c + state, owned & (begin == 0), ROWS, UNITS, HAS_FIRST)

    slots = counters + first_slot
    if RING:
        of_i, of_f, of_g, of_o = _inverse_factors(factors + direction * 4 * H + unit, unit < H, H)
        if (begin == 0) & (WAIT or end == 0):
            first = ((direction * T + _positions(0, length, backwards)).to(tl.int64) * B + row)[:, None] * (
                4 * H
            )
            mask = (length > 0)[:, None] & owned
            share = tl.load(sums + first + unit[None, :] + 2 * H, mask=mask, other=0.0)
            _tell_largest(slots, 0, row, there, T, B, direction, tl.maximum(tl.abs(share), tl.abs(c)))
            if WAIT:
                arrive(counter)
    spins = tl.full((), SPINS, tl.int32)
    for number in range(end - begin):
        step = begin + number
        active = (step < length)[:, None] & owned
        position = _positions(step, length, backwards)
        place = ((direction * T + position).to(tl.int64) * B + row)[:, None]
        gates = sums + place * (4 * H) + unit[None, :]
        i, f, g, o = _load_gates(gates, active, H)
        anew = _begins(resets, step, length, row, backwards, B, HAS_RESETS)[:, None]
        if RING:
            following = _positions(step + 1, length, backwards)
            share = (
                sums + ((direction * T + following).to(tl.int64) * B + row)[:, None] * (4 * H) + unit[None, :]
            )
            next_g = tl.load(share + 2 * H, mask=(step + 1 < length)[:, None] & owned, other=0.0)
        if WAIT:
            spins = wait(counter, (number + 1 if RING else number) * PARTS, spins)
        last = tl.maximum(step - 1, 0)
        before_h = (
            exchange + _slots(last, tile_length, tile_row, backwards, B, direction, RING) * width + tile_begin
        )
        if HAS_FIRST and not RING:
            before_h = tl.where(step > 0, before_h, first_h + (direction * B + tile_row) * H)
        shares = product(before_h, tile_there, weights, H, 4 * UNITS, ROWS, SPLIT, CHUNK, CHUNKS, AHEAD, MASKED,
                         ROWS_FIRST, PRECISION, UP)  # fmt: skip
        if RING:
            given = _row_factor(slots, last, row, there, T, B, direction, _UNIT_EXPONENT)
            shares = shares / given
        if RING or not HAS_FIRST:
            shares = tl.where(step > 0, shares, 0.0)
        if HAS_RESETS:
            shares = tl.where(anew, 0.0, shares)
            c = tl.where(anew, 0.0, c)
        if RING:
            share_i, share_f, share_g, share_o = _parts_of(shares, ROWS, UNITS)
            i, f = i + share_i * of_i, f + share_f * of_f
            g, o = g + share_g * of_g, o + share_o * of_o
        else:
            share_i, share_f, share_g, share_o = _parts_of(shares, ROWS, UNITS)
            i, f, g, o = i + share_i, f + share_f, g + share_g, o + share_o
        before = c
        after = tl.sigmoid(f) * c + tl.sigmoid(i) * _tanh(g, EXACT)
        made = tl.sigmoid(o) * _tanh(after, EXACT) + _poison(spins)
        c = tl.where(active, after, c)
        h = tl.where(active, made, h)
        output = tl.where(active, made, 0.0)
        written = (
            outputs + (position.to(tl.int64) * B + row)[:, None] * (D * H) + direction * H + unit[None, :]
        )
        if RING:
            slot = _slots(step, length, row, backwards, B, direction, RING)
            given = narrowed(output, _row_factor(slots, step, row, there, T, B, direction, _UNIT_EXPONENT))
            tl.store(exchange + slot[:, None] * H + unit[None, :], given, mask=owned)
            largest = tl.maximum(tl.maximum(tl.abs(output), tl.abs(c)), tl.abs(next_g))
            _tell_largest(slots, step + 1, row, there, T, B, direction, largest)
        else:
            tl.store(written, output.to(outputs.dtype.element_ty), mask=owned)
        if WAIT:
            arrive(counter)
        if RING:
            tl.store(written, output.to(outputs.dtype.element_ty), mask=owned)
        if KEEP_CELLS:
            tl.store(cells + place * H + unit[None, :], before, mask=owned)
        if KEEP_SUMS:
            _store_gates(gates, i, f, g, o, active, H)
    tl.store(state_h + state, h.to(state_h.dtype.element_ty), mask=owned)
    tl.store(state_c + state, c, mask=owned)


@triton.jit
def _store_partial(partials, own, found, ROWS: tl.constexpr, M: tl.constexpr):
    """Stores a program's partial product (ROWS, M) for all units of its team."""
    tile = tl.arange(0, ROWS)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(partials + own * (ROWS * M) + tile, found)


@triton.jit
def _sum_partials(partials, own, member, ROWS: tl.constexpr, UNITS: tl.constexpr, TEAM: tl.constexpr):
    """Returns the sum of the partial products that a team's programs computed for this one's units: (ROWS, UNITS)."""
    M: tl.constexpr = TEAM * UNITS
    where = tl.arange(0, ROWS)[:, None] * M + member * UNITS + tl.arange(0, UNITS)[None, :]
    first = partials + own * (ROWS * M)
    total = tl.load(first + where, cache_modifier=".cg")
    for other in tl.static_range(1, TEAM):
        total += tl.load(first + other * ROWS * M + where, cache_modifier=".cg")
    return total


@triton.jit
def _laid_as_loads(values, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Returns the values in the layout of the loads, pairs of units per thread; spares Triton a conversion per load."""
    even, odd = tl.split(tl.reshape(values, (ROWS, UNITS // 2, 2)))
    return tl.reshape(tl.join(even, odd), (ROWS, UNITS))


@triton.jit
def _load_cell(gates, cells, active, H: tl.constexpr, EXACT: tl.constexpr):
    """Loads the gates of a step, after their nonlinearities, and c before it."""
    i, f, g, o = _load_gates(gates, active, H)
    before = tl.load(cells, mask=active, other=0.0)
    return tl.sigmoid(i), tl.sigmoid(f), _tanh(g, EXACT), tl.sigmoid(o), before


@triton.jit
def _cell_back(i, f, g, o, before, squashed, dh, dc, active, anew, HAS_RESETS: tl.constexpr):
    """Returns the gradients of the sums, and of c before the step, none where the state begins anew."""
    total = dc + dh * o * (1 - squashed * squashed)
    d_i = tl.where(active, total * g * i * (1 - i), 0.0)
    d_f = tl.where(active, total * before * f * (1 - f), 0.0)
    d_g = tl.where(active, total * i * (1 - g * g), 0.0)
    d_o = tl.where(active, dh * squashed * o * (1 - o), 0.0)
    dc = tl.where(active, total * f, dc)
    if HAS_RESETS:
        dc = tl.where(anew, 0.0, dc)
    return d_i, d_f, d_g, d_o, dc


@triton.jit(do_not_specialize=["T", "B", "begin", "end", "first_direction", "first_group", "groups", "span",
                               "first_team", "first_slot"])  # fmt: skip
def lstm_backward(sums, recurrent, exchange, partials, cells, doutputs, dsums, last_dh, last_dc, state_dc,
                  lengths, resets, counters, factors, T, B, begin, end, first_direction, first_group, groups, span,
                  first_team, first_slot, doutputs_step, doutputs_row, H: tl.constexpr, UNITS: tl.constexpr,
                  ROWS: tl.constexpr, TEAM: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
                  CHUNKS: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr, ROWS_FIRST: tl.constexpr,
                  PRECISION: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr, MULTIPLIES: tl.constexpr,
                  ENDS: tl.constexpr,
                  BACKWARDS: tl.constexpr, HAS_LAST_H: tl.constexpr, HAS_LAST_C: tl.constexpr,
                  HAS_LENGTHS: tl.constexpr, HAS_RESETS: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """Runs steps end - 1 down to begin of the walk.

    Args:
        sums: (D, T, B, 4H), the gates before their nonlinearities.
        recurrent: (D, 4H, H).
        exchange: with RING (D, 2, B, 4H) float16, ``dsums`` of two steps divided by ``factors``; otherwise ``dsums``.
        partials: float32, a tile (ROWS, TEAM UNITS) a program, used if a team has more than one.
        cells: (D, T, B, H), c before the step at each position.
        doutputs: (T, B, D H), the gradient of the outputs, with strides ``doutputs_step`` and ``doutputs_row``.
        dsums: (D, T, B, 4H) is written, zero in the padding.
        last_dh, last_dc: (D, B, H), the gradients of the last state, read with HAS_LAST_H and HAS_LAST_C; otherwise
            they are zero.
        state_dc: (D, B, H) is written, the gradient of c before step ``begin``; if ``end`` is not T it holds that after
            step ``end`` - 1.
        first_team: where the counters of teams begin, one a direction, group of rows and team.
        first_slot: where, with RING, the slots begin.
        TEAM: so many programs share the units of all of them and part the sum over 4H among themselves: each makes its
            part of the sum for all, then adds up all parts for its own units. What a program takes in, and that bounds
            large layers, is less by that factor, for another exchange a step.
        MULTIPLIES, ENDS: whether a launch that cannot wait does the first, or the second half of a team's step.
        Others: as in `lstm_forward`.
    """
    PARTS: tl.constexpr = (H + TEAM * UNITS - 1) // (TEAM * UNITS) * TEAM
    TERMS: tl.constexpr = 4 * H // TEAM
    EXACT: tl.constexpr = sums.dtype.element_ty == tl.float32
    part, group, direction = _place(first_direction, first_group, groups, PARTS)
    team, member = part // TEAM, part % TEAM
    backwards = (BACKWARDS >> direction) & 1
    group_number = direction * tl.cdiv(B, span) + group
    counter = counters + group_number * COUNTER_STRIDE
    team_number = group_number * (PARTS // TEAM) + team
    team_counter = counters + first_team + team_number * COUNTER_STRIDE

    owner, half = weight_rows(TEAM * UNITS, SPLIT)
    weight_unit = team * TEAM * UNITS + owner
    matrix = recurrent + (direction * 4 * H + member * TERMS) * H
    weights = load_weights(matrix, weight_unit, H, half, weight_unit < H, TERMS, SPLIT, CHUNK, CHUNKS, UP)

    row, there, length = _rows(lengths, group, span, B, T, ROWS, 1, HAS_LENGTHS)
    unit = part * UNITS + tl.arange(0, UNITS)
    owned = there[:, None] & (unit < H)[None, :]
    tile_row, tile_there, tile_length = _rows(lengths, group, span, B, T, ROWS, SPLIT, HAS_LENGTHS)
    tile_begin = (0 if RING else direction.to(tl.int64) * T * B * (4 * H)) + member * TERMS
    state = (direction * B + row)[:, None] * H + unit[None, :]
    dh_last = _given(last_dh + state, owned, ROWS, UNITS, HAS_LAST_H)
    dc = tl.load(state_dc + state, mask=owned & (end < T), other=0.0)
    dc += _given(last_dc + state, owned & (end == T), ROWS, UNITS, HAS_LAST_C)
    slots = counters + first_slot
    if RING:
        of_i, of_f, of_g, of_o = _inverse_factors(factors + direction * 4 * H + unit, unit < H, H)
        most = tl.maximum(tl.maximum(of_i, of_f), tl.maximum(of_g, of_o))
        if (end == T) & (WAIT or begin == T):
            first = (_positions(T - 1, length, backwards).to(tl.int64) * doutputs_step + row * doutputs_row)[
                :, None
            ]
            mask = (length == T)[:, None] & owned
            given = tl.load(doutputs + first + direction * H + unit[None, :], mask=mask, other=0.0).to(
                tl.float32
            )
            largest = tl.maximum(tl.abs(given), tl.where(mask, tl.abs(dh_last), 0.0))
            _tell_largest(slots, T - 1, row, there, T, B, direction, tl.maximum(largest, tl.abs(dc)) * most)
            if WAIT:
                arrive(counter)
    spins = tl.full((), SPINS, tl.int32)
    for number in range(end - begin):
        step = end - 1 - number
        active = (step < length)[:, None] & owned
        position = _positions(step, length, backwards)
        place = ((direction * T + position).to(tl.int64) * B + row)[:, None]
        own_cells = cells + place * H + unit[None, :]
        i, f, g, o, before = _load_cell(sums + place * (4 * H) + unit[None, :], own_cells, active, H, EXACT)
        incoming = (position.to(tl.int64) * doutputs_step + row * doutputs_row)[:, None] + direction * H
        dh = tl.load(doutputs + incoming + unit[None, :], mask=active, other=0.0).to(tl.float32)
        squashed = _tanh(f * before + i * g, EXACT)
        new = _begins(resets, step, length, row, backwards, B, HAS_RESETS)[:, None]
        follows = _begins(resets, step + 1, length, row, backwards, B, HAS_RESETS)[:, None]
        if RING:
            earlier = (
                _positions(step - 1, length, backwards).to(tl.int64) * doutputs_step + row * doutputs_row
            )
            mask = ((step > 0) & (step <= length))[:, None] & owned
            given = tl.load(doutputs + earlier[:, None] + direction * H + unit[None, :], mask=mask, other=0.0)
            next_largest = tl.maximum(
                tl.abs(given.to(tl.float32)), tl.where((step == length)[:, None], tl.abs(dh_last), 0.0)
            )
        if WAIT:
            spins = wait(counter, (number + 1 if RING else number) * PARTS, spins)
        after = tl.minimum(step + 1, T - 1)
        slot = _slots(after, tile_length, tile_row, backwards, B, direction, RING) * (4 * H) + tile_begin
        if MULTIPLIES:
            from_next = product(exchange + slot, tile_there, weights, TERMS, TEAM * UNITS, ROWS, SPLIT, CHUNK, CHUNKS,
                                AHEAD, MASKED, ROWS_FIRST, PRECISION, UP)  # fmt: skip
        if TEAM > 1:
            if MULTIPLIES:
                _store_partial(partials, team_number * TEAM + member, from_next, ROWS, TEAM * UNITS)
            if WAIT:
                arrive(team_counter)
                spins = wait(team_counter, (number + 1) * TEAM, spins)
            from_next = _sum_partials(partials, team_number * TEAM, member, ROWS, UNITS, TEAM)
        else:
            from_next = _laid_as_loads(from_next, ROWS, UNITS)
        if ENDS:
            if HAS_RESETS:
                from_next = tl.where(follows, 0.0, from_next)
            if RING:
                from_next = from_next / _row_factor(slots, step + 1, row, there, T, B, direction, _LEAST)
            dh += tl.where((step + 1 == length)[:, None], dh_last, from_next)
            dh += _poison(spins)
            d_i, d_f, d_g, d_o, dc = _cell_back(i, f, g, o, before, squashed, dh, dc, active, new, HAS_RESETS)
            if RING:
                slot = _slots(step, length, row, backwards, B, direction, RING)
                given = _row_factor(slots, step, row, there, T, B, direction, _LEAST)
                x_i, x_f, x_g, x_o = d_i * of_i, d_f * of_f, d_g * of_g, d_o * of_o
                _store_gates(exchange + slot[:, None] * (4 * H) + unit[None, :], narrowed(x_i, given),
                             narrowed(x_f, given), narrowed(x_g, given), narrowed(x_o, given), owned, H)  # fmt: skip
                largest = tl.maximum(
                    tl.maximum(tl.abs(x_i), tl.abs(x_f)), tl.maximum(tl.abs(x_g), tl.abs(x_o))
                )
                largest = tl.maximum(largest, tl.maximum(tl.abs(dc), next_largest) * most)
                earlier = tl.maximum(step - 1, 0)
                _tell_largest(slots, earlier, row, there & (step > 0), T, B, direction, largest)
            else:
                _store_gates(dsums + place * (4 * H) + unit[None, :], d_i, d_f, d_g, d_o, owned, H)
            if WAIT:
                arrive(counter)
            if RING:
                _store_gates(dsums + place * (4 * H) + unit[None, :], d_i, d_f, d_g, d_o, owned, H)
    tl.store(state_dc + state, dc, mask=owned)


@triton.jit(do_not_specialize=["T", "B"])
def lstm_cells(sums, first_c, cells, lengths, resets, T, B, H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
               AHEAD: tl.constexpr, BACKWARDS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LENGTHS: tl.constexpr,
               HAS_RESETS: tl.constexpr):  # fmt: skip
    """Recomputes the cell states from the gates' sums; programs are independent.

    Args:
        sums: (D, T, B, 4H). first_c: (D, B, H), read with HAS_FIRST.
        cells: (D, T, B, H) is written, c before the step at each position, in padding c after the last step.
        AHEAD: steps whose gates are loaded together.
        Others: as in `lstm_forward`.
    """
    PARTS: tl.constexpr = (H + UNITS - 1) // UNITS
    EXACT: tl.constexpr = sums.dtype.element_ty == tl.float32
    program = tl.program_id(0)
    groups = tl.cdiv(B, ROWS)
    direction = program // (PARTS * groups)
    backwards = (BACKWARDS >> direction) & 1
    row = program // PARTS % groups * ROWS + tl.arange(0, ROWS)
    unit = program % PARTS * UNITS + tl.arange(0, UNITS)
    length = _row_lengths(lengths, row, row < B, T, HAS_LENGTHS)
    owned = (row < B)[:, None] & (unit < H)[None, :]
    c = _given(first_c + (direction * B + row)[:, None] * H + unit[None, :], owned, ROWS, UNITS, HAS_FIRST)
    for first in range(0, T, AHEAD):
        loaded = ()
        for n in tl.static_range(AHEAD):  # a step waits for the step before, but its loads do not
            active = (first + n < length)[:, None] & owned
            position = _positions(first + n, length, backwards)
            gates = (
                sums + ((direction * T + position).to(tl.int64) * B + row)[:, None] * (4 * H) + unit[None, :]
            )
            loaded = loaded + (  # type: ignore[assignment]
                tl.load(gates, mask=active, other=0.0),
                tl.load(gates + H, mask=active, other=0.0),
                tl.load(gates + 2 * H, mask=active, other=0.0),
                _begins(resets, first + n, length, row, backwards, B, HAS_RESETS)[:, None],
            )
        for n in tl.static_range(AHEAD):
            step = first + n
            place = ((direction * T + _positions(step, length, backwards)).to(tl.int64) * B + row)[:, None]
            if HAS_RESETS:
                c = tl.where(loaded[4 * n + 3], 0.0, c)
            tl.store(cells + place * H + unit[None, :], c, mask=owned & (step < T))
            i = tl.sigmoid(loaded[4 * n].to(tl.float32))
            f = tl.sigmoid(loaded[4 * n + 1].to(tl.float32))  # type: ignore[unreachable]
            after = f * c + i * _tanh(loaded[4 * n + 2].to(tl.float32), EXACT)
            c = tl.where((step < length)[:, None] & owned, after, c)
