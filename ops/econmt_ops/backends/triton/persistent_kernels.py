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

With GRU the kernels run a GRU, which walks forwards only: its four sums are r, z, the inputs' share of n and that of h
(see `econmt_ops.cells.gru`), and c is h, in the type of the outputs.

With RING, float32 layers exchange float16, which has the mantissa of TF32, in a ring of two steps. Each row of a step
is multiplied by a power of two of its own, so that float16 holds whatever float32 does: its programs tell each other,
at the step before, the largest number from which the row follows (slots, one a direction, step and row).
"""

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton.exchange import COUNTER_STRIDE, SPINS, arrive, wait
from econmt_ops.backends.triton.persistent_product import load_weights, narrowed, product, weight_rows
from econmt_ops.backends.triton.persistent_walk import (
    LEAST_EXPONENT,
    UNIT_EXPONENT,
    begins_anew,
    exchange_rows,
    gate_parts,
    group_rows,
    inverse_factors,
    load_gates,
    load_state,
    place_of,
    places_at,
    positions_at,
    raise_bound,
    row_factor,
    row_lengths,
    share_of_g,
    store_gates,
)
from econmt_ops.backends.triton.pointwise import tanh


@triton.jit
def _tanh(x, EXACT: tl.constexpr):
    """Returns tanh x, of which small values keep their digits if EXACT."""
    if EXACT:
        return tanh(x)
    else:
        return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _poison(spins):
    """Returns zero, or NaN if a wait timed out."""
    return tl.where(spins == 0, float("nan"), 0.0)


@triton.jit
def _kept(state, given, first, mask, ROWS: tl.constexpr, UNITS: tl.constexpr, GIVEN: tl.constexpr):
    """Returns a state (ROWS, UNITS), that which is given if a launch is the first, else that which one before kept."""
    kept = tl.load(state, mask=mask & (first == 0), other=0.0).to(tl.float32)
    return kept + load_state(given, mask & first, ROWS, UNITS, GIVEN)


@triton.jit
def _gate_rows(recurrent, direction, part, H: tl.constexpr, UNITS: tl.constexpr, SPLIT: tl.constexpr,
               CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Loads the weights of a program's units; the four gates of a unit are adjacent."""
    owner, half = weight_rows(4 * UNITS, SPLIT)
    matrix_row = (direction * 4 + owner % 4) * H + part * UNITS + owner // 4
    live = part * UNITS + owner // 4 < H
    return load_weights(recurrent, matrix_row * H, 1, half, live, H, SPLIT, CHUNK, CHUNKS, UP)


@triton.jit
def _add_shares(i, f, g, o, shares, of_i, of_f, of_g, of_o, ROWS: tl.constexpr, UNITS: tl.constexpr,
                RING: tl.constexpr):  # fmt: skip
    """Returns the sums of the gates with the product (ROWS, 4 UNITS), with RING in units of the inverse factors."""
    share_i, share_f, share_g, share_o = gate_parts(shares, ROWS, UNITS)
    if RING:
        return i + share_i * of_i, f + share_f * of_f, g + share_g * of_g, o + share_o * of_o
    else:
        return i + share_i, f + share_f, g + share_g, o + share_o


@triton.jit
def _cell(i, f, g, o, c, h, active, zero, KIND: tl.constexpr, GRU: tl.constexpr):
    """Returns c and h after a step, and its output, zero where no step is; from the sums of the gates.

    KIND: type of the outputs.
    """
    EXACT: tl.constexpr = KIND.primitive_bitwidth == 32
    if GRU:
        n = _tanh(g + tl.sigmoid(i) * o, EXACT)
        after = (n + tl.sigmoid(f) * (c - n) + zero).to(KIND).to(tl.float32)
        made = after
    else:
        after = tl.sigmoid(f) * c + tl.sigmoid(i) * _tanh(g, EXACT)
        made = tl.sigmoid(o) * _tanh(after, EXACT) + zero
    return tl.where(active, after, c), tl.where(active, made, h), tl.where(active, made, 0.0)


@triton.jit(do_not_specialize=["T", "B", "begin", "end", "first_direction", "first_group", "groups", "span",
                               "first_slot"])  # fmt: skip
def lstm_forward(sums, recurrent, exchange, outputs, cells, first_h, first_c, state_h, state_c, lengths, resets,
                 counters, factors, T, B, begin, end, first_direction, first_group, groups, span, first_slot,
                 D: tl.constexpr, H: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
                 CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr,
                 ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr,
                 BACKWARDS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_RESETS: tl.constexpr,
                 RING: tl.constexpr, KEEP_CELLS: tl.constexpr, KEEP_SUMS: tl.constexpr,
                 GRU: tl.constexpr):  # fmt: skip
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
        SPLIT, CHUNK, CHUNKS, ROWS_FIRST: see `persistent_product`.
        BACKWARDS: bit d is set if direction d walks backwards.
        UP: products in float32, for the interpreter, which multiplies bfloat16 incorrectly.
        WAIT: True if programs wait at grid barriers; otherwise a launch is one step.
    """
    PARTS: tl.constexpr = (H + UNITS - 1) // UNITS
    part, group, direction = place_of(first_direction, first_group, groups, PARTS)
    backwards = (BACKWARDS >> direction) & 1
    counter = counters + (direction * tl.cdiv(B, span) + group) * COUNTER_STRIDE

    weights = _gate_rows(recurrent, direction, part, H, UNITS, SPLIT, CHUNK, CHUNKS, UP)
    row, there, length = group_rows(lengths, group, span, B, T, ROWS, 1, HAS_LENGTHS)
    unit = part * UNITS + tl.arange(0, UNITS)
    owned = there[:, None] & (unit < H)[None, :]
    tile_row, tile_there, tile_length = group_rows(lengths, group, span, B, T, ROWS, SPLIT, HAS_LENGTHS)
    width: tl.constexpr = H if RING else D * H
    tile_begin = 0 if RING else direction * H
    state = (direction * B + row)[:, None] * H + unit[None, :]
    h = _kept(state_h + state, first_h + state, begin == 0, owned, ROWS, UNITS, HAS_FIRST)
    c = _kept(state_c + state, first_c + state, begin == 0, owned, ROWS, UNITS, HAS_FIRST)
    slots = counters + first_slot
    LEAST: tl.constexpr = LEAST_EXPONENT if GRU else UNIT_EXPONENT
    of_i, of_f, of_g, of_o = inverse_factors(factors + direction * 4 * H + unit, unit < H, H, RING)
    if RING and (begin == 0) & (WAIT or end == 0):
        first_g = share_of_g(sums, 0, length, row, unit, owned, backwards, T, B, direction, H, GRU)
        raise_bound(slots, 0, row, there, T, B, direction, tl.maximum(first_g, tl.abs(c)))
        if WAIT:
            arrive(counter)
    spins = tl.full((), SPINS, tl.int32)
    for number in range(end - begin):
        step = begin + number
        active = (step < length)[:, None] & owned
        place = places_at(step, length, row, backwards, T, B, direction)
        gates = sums + place * (4 * H) + unit[None, :]
        i, f, g, o = load_gates(gates, active, H)
        anew = begins_anew(resets, step, length, row, backwards, B, HAS_RESETS)[:, None]
        if RING:
            next_g = share_of_g(sums, step + 1, length, row, unit, owned, backwards, T, B, direction, H, GRU)
        if WAIT:
            spins = wait(counter, (number + 1 if RING else number) * PARTS, spins)
        last = tl.maximum(step - 1, 0)
        slot = exchange_rows(last, tile_length, tile_row, backwards, B, direction, RING)
        before_h = exchange + slot * width + tile_begin
        if HAS_FIRST and not RING:
            before_h = tl.where(step > 0, before_h, first_h + (direction * B + tile_row) * H)
        shares = product(before_h, tile_there, weights, H, 4 * UNITS, ROWS, SPLIT, CHUNK, CHUNKS, MASKED,
                         ROWS_FIRST, PRECISION, UP)  # fmt: skip
        if RING:
            shares /= row_factor(slots, last, row, there, T, B, direction, LEAST)
        if RING or not HAS_FIRST:
            shares = tl.where(step > 0, shares, 0.0)
        if HAS_RESETS:
            shares = tl.where(anew, 0.0, shares)
            c = tl.where(anew, 0.0, c)
        i, f, g, o = _add_shares(i, f, g, o, shares, of_i, of_f, of_g, of_o, ROWS, UNITS, RING)
        before = c
        c, h, output = _cell(i, f, g, o, c, h, active, _poison(spins), outputs.dtype.element_ty, GRU)
        written = outputs + (place - direction * T * B) * (D * H) + direction * H + unit[None, :]
        if RING:
            slot = exchange_rows(step, length, row, backwards, B, direction, RING)[:, None]
            factor = row_factor(slots, step, row, there, T, B, direction, LEAST)
            tl.store(exchange + slot * H + unit[None, :], narrowed(output, factor), mask=owned)
            largest = tl.maximum(tl.maximum(tl.abs(output), tl.abs(c)), next_g)
            raise_bound(slots, step + 1, row, there, T, B, direction, largest)
        else:
            tl.store(written, output.to(outputs.dtype.element_ty), mask=owned)
        if WAIT:
            arrive(counter)
        if RING:
            tl.store(written, output.to(outputs.dtype.element_ty), mask=owned)
        if KEEP_CELLS:
            tl.store(cells + place * H + unit[None, :], before, mask=owned)
        if KEEP_SUMS:
            store_gates(gates, i, f, g, o, active, H)
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
def _load_cell(sums, cells, place, unit, active, H: tl.constexpr, EXACT: tl.constexpr, GRU: tl.constexpr):
    """Loads a step's gates, activated, c before it and tanh c after it; of a GRU r, z, n, h's share of n, and h."""
    i, f, g, o = load_gates(sums + place * (4 * H) + unit[None, :], active, H)
    before = tl.load(cells + place * H + unit[None, :], mask=active, other=0.0).to(tl.float32)
    i, f = tl.sigmoid(i), tl.sigmoid(f)
    if GRU:
        g = _tanh(g + i * o, EXACT)
        return i, f, g, o, before, g
    else:
        g = _tanh(g, EXACT)
        return i, f, g, tl.sigmoid(o), before, _tanh(f * before + i * g, EXACT)


@triton.jit
def _cell_back(
    i, f, g, o, before, squashed, dh, dc, active, anew, HAS_RESETS: tl.constexpr, GRU: tl.constexpr
):
    """Returns the gradients of the sums, and of c before the step, none where the state begins anew."""
    if GRU:
        total = dc + dh
        d_g = tl.where(active, total * (1 - f) * (1 - g * g), 0.0)
        d_i = d_g * o * i * (1 - i)
        d_f = tl.where(active, total * (before - g) * f * (1 - f), 0.0)
        d_o = d_g * i
    else:
        total = dc + dh * o * (1 - squashed * squashed)
        d_i = tl.where(active, total * g * i * (1 - i), 0.0)
        d_f = tl.where(active, total * before * f * (1 - f), 0.0)
        d_g = tl.where(active, total * i * (1 - g * g), 0.0)
        d_o = tl.where(active, dh * squashed * o * (1 - o), 0.0)
    dc = tl.where(active, total * f, dc)
    if HAS_RESETS:
        dc = tl.where(anew, 0.0, dc)
    return d_i, d_f, d_g, d_o, dc


@triton.jit
def _gate_columns(recurrent, direction, team, member, H: tl.constexpr, UNITS: tl.constexpr, TEAM: tl.constexpr,
                  SPLIT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, UP: tl.constexpr):  # fmt: skip
    """Loads the weights of a team's units, from its member's part of the gates."""
    TERMS: tl.constexpr = 4 * H // TEAM
    owner, half = weight_rows(TEAM * UNITS, SPLIT)
    weight_unit = team * TEAM * UNITS + owner
    matrix = recurrent + (direction * 4 * H + member * TERMS) * H
    return load_weights(matrix, weight_unit, H, half, weight_unit < H, TERMS, SPLIT, CHUNK, CHUNKS, UP)


@triton.jit
def _doutput(doutputs, step, length, row, mask, backwards, step_stride, row_stride):
    """Loads the gradient (ROWS, UNITS) of the outputs at a step of the walk."""
    place = positions_at(step, length, backwards).to(tl.int64) * step_stride + row * row_stride
    return tl.load(doutputs + place[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _from_outside(doutputs, dh_last, step, length, row, owned, backwards, step_stride, row_stride):
    """Returns a bound (ROWS, UNITS) of the gradient of h at a step, but for what later steps add."""
    mask = ((step >= 0) & (step < length))[:, None] & owned
    given = _doutput(doutputs, step, length, row, mask, backwards, step_stride, row_stride)
    return tl.maximum(tl.abs(given), tl.where((step + 1 == length)[:, None], tl.abs(dh_last), 0.0))


@triton.jit
def _product_of_team(source, there, weights, partials, counter, team, member, number, spins, H: tl.constexpr,
                     UNITS: tl.constexpr, ROWS: tl.constexpr, TEAM: tl.constexpr, SPLIT: tl.constexpr,
                     CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MASKED: tl.constexpr,
                     ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr,
                     MULTIPLIES: tl.constexpr):  # fmt: skip
    """Returns the product (ROWS, UNITS) of the gates' gradients with the weights, and the polls left to wait.

    Args:
        source: Gates' gradients that this program reads. there: Rows of it that exist.
        team: Number of the team, which has made ``number`` products. counter: That of the team.
        Others: as in `lstm_backward`.
    """
    if MULTIPLIES:
        made = product(source, there, weights, 4 * H // TEAM, TEAM * UNITS, ROWS, SPLIT, CHUNK, CHUNKS,
                       MASKED, ROWS_FIRST, PRECISION, UP)  # fmt: skip
    if TEAM == 1:
        return _laid_as_loads(made, ROWS, UNITS), spins
    else:
        if MULTIPLIES:
            _store_partial(partials, team * TEAM + member, made, ROWS, TEAM * UNITS)
        if WAIT:
            arrive(counter)
            spins = wait(counter, (number + 1) * TEAM, spins)
        return _sum_partials(partials, team * TEAM, member, ROWS, UNITS, TEAM), spins


@triton.jit
def _store_narrowed(where, i, f, g, o, factor, mask, H: tl.constexpr):
    """Stores four values, one per gate, times powers of two in float16; returns the largest of their sizes."""
    store_gates(
        where, narrowed(i, factor), narrowed(f, factor), narrowed(g, factor), narrowed(o, factor), mask, H
    )
    return tl.maximum(tl.maximum(tl.abs(i), tl.abs(f)), tl.maximum(tl.abs(g), tl.abs(o)))


@triton.jit(do_not_specialize=["T", "B", "begin", "end", "first_direction", "first_group", "groups", "span",
                               "first_team", "first_slot"])  # fmt: skip
def lstm_backward(sums, recurrent, exchange, partials, cells, doutputs, dsums, last_dh, last_dc, state_dc,
                  lengths, resets, counters, factors, T, B, begin, end, first_direction, first_group, groups, span,
                  first_team, first_slot, doutputs_step, doutputs_row, H: tl.constexpr, UNITS: tl.constexpr,
                  ROWS: tl.constexpr, TEAM: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
                  CHUNKS: tl.constexpr, MASKED: tl.constexpr, ROWS_FIRST: tl.constexpr,
                  PRECISION: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr, MULTIPLIES: tl.constexpr,
                  ENDS: tl.constexpr, BACKWARDS: tl.constexpr, HAS_LAST_H: tl.constexpr, HAS_LAST_C: tl.constexpr,
                  HAS_LENGTHS: tl.constexpr, HAS_RESETS: tl.constexpr, RING: tl.constexpr,
                  GRU: tl.constexpr):  # fmt: skip
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
    EXACT: tl.constexpr = sums.dtype.element_ty == tl.float32
    part, group, direction = place_of(first_direction, first_group, groups, PARTS)
    team, member = part // TEAM, part % TEAM
    backwards = (BACKWARDS >> direction) & 1
    group_number = direction * tl.cdiv(B, span) + group
    counter = counters + group_number * COUNTER_STRIDE
    team_number = group_number * (PARTS // TEAM) + team
    team_counter = counters + first_team + team_number * COUNTER_STRIDE
    weights = _gate_columns(recurrent, direction, team, member, H, UNITS, TEAM, SPLIT, CHUNK, CHUNKS, UP)
    row, there, length = group_rows(lengths, group, span, B, T, ROWS, 1, HAS_LENGTHS)
    unit = part * UNITS + tl.arange(0, UNITS)
    owned = there[:, None] & (unit < H)[None, :]
    tile_row, tile_there, tile_length = group_rows(lengths, group, span, B, T, ROWS, SPLIT, HAS_LENGTHS)
    tile_begin = (0 if RING else direction.to(tl.int64) * T * B * (4 * H)) + member * (4 * H // TEAM)
    state = (direction * B + row)[:, None] * H + unit[None, :]
    dh_last = load_state(last_dh + state, owned, ROWS, UNITS, HAS_LAST_H)
    dc = _kept(state_dc + state, last_dc + state, end == T, owned, ROWS, UNITS, HAS_LAST_C)
    doutputs += direction * H + unit[None, :]
    slots = counters + first_slot
    if RING:
        of_i, of_f, of_g, of_o = inverse_factors(factors + direction * 4 * H + unit, unit < H, H, RING)
        most = tl.maximum(tl.maximum(of_i, of_f), tl.maximum(of_g, of_o))
        if (end == T) & (WAIT or begin == T):
            largest = _from_outside(doutputs, dh_last, T - 1, length, row, owned, backwards, doutputs_step,
                                    doutputs_row)  # fmt: skip
            raise_bound(slots, T - 1, row, there, T, B, direction, tl.maximum(largest, tl.abs(dc)) * most)
            if WAIT:
                arrive(counter)
    spins = tl.full((), SPINS, tl.int32)
    for number in range(end - begin):
        step = end - 1 - number
        active = (step < length)[:, None] & owned
        place = places_at(step, length, row, backwards, T, B, direction)
        i, f, g, o, old, tanh_c = _load_cell(sums, cells, place, unit, active, H, EXACT, GRU)
        dh = _doutput(doutputs, step, length, row, active, backwards, doutputs_step, doutputs_row)
        new = begins_anew(resets, step, length, row, backwards, B, HAS_RESETS)[:, None]
        follows = begins_anew(resets, step + 1, length, row, backwards, B, HAS_RESETS)[:, None]
        if RING:
            next_largest = _from_outside(doutputs, dh_last, step - 1, length, row, owned, backwards, doutputs_step,
                                         doutputs_row)  # fmt: skip
        if WAIT:
            spins = wait(counter, (number + 1 if RING else number) * PARTS, spins)
        slot = exchange_rows(
            tl.minimum(step + 1, T - 1), tile_length, tile_row, backwards, B, direction, RING
        )
        from_next, spins = _product_of_team(
            exchange + slot * (4 * H) + tile_begin, tile_there, weights, partials, team_counter, team_number, member,
            number, spins, H, UNITS, ROWS, TEAM, SPLIT, CHUNK, CHUNKS, MASKED, ROWS_FIRST, PRECISION, UP,
            WAIT, MULTIPLIES)  # fmt: skip
        if ENDS:
            if HAS_RESETS:
                from_next = tl.where(follows, 0.0, from_next)
            if RING:
                from_next /= row_factor(slots, step + 1, row, there, T, B, direction, LEAST_EXPONENT)
            dh += tl.where((step + 1 == length)[:, None], dh_last, from_next) + _poison(spins)
            d_i, d_f, d_g, d_o, dc = _cell_back(i, f, g, o, old, tanh_c, dh, dc, active, new, HAS_RESETS, GRU)
            if RING:
                slot = exchange_rows(step, length, row, backwards, B, direction, RING)[:, None] * (4 * H)
                factor = row_factor(slots, step, row, there, T, B, direction, LEAST_EXPONENT)
                largest = _store_narrowed(exchange + slot + unit[None, :], d_i * of_i, d_f * of_f, d_g * of_g,
                                          d_o * of_o, factor, owned, H)  # fmt: skip
                largest = tl.maximum(largest, tl.maximum(tl.abs(dc), next_largest) * most)
                raise_bound(slots, tl.maximum(step - 1, 0), row, there & (step > 0), T, B, direction, largest)
            else:
                store_gates(dsums + place * (4 * H) + unit[None, :], d_i, d_f, d_g, d_o, owned, H)
            if WAIT:
                arrive(counter)
            if RING:
                store_gates(dsums + place * (4 * H) + unit[None, :], d_i, d_f, d_g, d_o, owned, H)
    tl.store(state_dc + state, dc, mask=owned)


@triton.jit(do_not_specialize=["T", "B"])
def lstm_cells(sums, first_c, cells, lengths, resets, T, B, H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
               AHEAD: tl.constexpr, BACKWARDS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LENGTHS: tl.constexpr,
               HAS_RESETS: tl.constexpr, EXACT: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """Recomputes the cell states from the gates' sums; programs are independent.

    Args:
        sums: (D, T, B, 4H). first_c: (D, B, H), read with HAS_FIRST.
        cells: (D, T, B, H) is written, c before the step at each position, in padding c after the last step.
        AHEAD: steps whose gates are loaded together.
        LAST: cells of a single direction have a further position, for c after the last step.
        Others: as in `lstm_forward`.
    """
    PARTS: tl.constexpr = (H + UNITS - 1) // UNITS
    program = tl.program_id(0)
    groups = tl.cdiv(B, ROWS)
    direction = program // (PARTS * groups)
    backwards = (BACKWARDS >> direction) & 1
    row = program // PARTS % groups * ROWS + tl.arange(0, ROWS)
    unit = program % PARTS * UNITS + tl.arange(0, UNITS)
    length = row_lengths(lengths, row, row < B, T, HAS_LENGTHS)
    owned = (row < B)[:, None] & (unit < H)[None, :]
    c = load_state(
        first_c + (direction * B + row)[:, None] * H + unit[None, :], owned, ROWS, UNITS, HAS_FIRST
    )
    for first in range(0, T, AHEAD):
        loaded = ()
        for n in tl.static_range(AHEAD):  # a step waits for the step before, but its loads do not
            active = (first + n < length)[:, None] & owned
            position = positions_at(first + n, length, backwards)
            gates = (
                sums + ((direction * T + position).to(tl.int64) * B + row)[:, None] * (4 * H) + unit[None, :]
            )
            loaded = loaded + (  # type: ignore[assignment]
                tl.load(gates, mask=active, other=0.0),
                tl.load(gates + H, mask=active, other=0.0),
                tl.load(gates + 2 * H, mask=active, other=0.0),
                begins_anew(resets, first + n, length, row, backwards, B, HAS_RESETS)[:, None],
            )
        for n in tl.static_range(AHEAD):
            step = first + n
            place = ((direction * T + positions_at(step, length, backwards)).to(tl.int64) * B + row)[:, None]
            if HAS_RESETS:
                c = tl.where(loaded[4 * n + 3], 0.0, c)
            tl.store(cells + place * H + unit[None, :], c, mask=owned & (step < T))
            i = tl.sigmoid(loaded[4 * n].to(tl.float32))
            f = tl.sigmoid(loaded[4 * n + 1].to(tl.float32))  # type: ignore[unreachable]
            after = f * c + i * _tanh(loaded[4 * n + 2].to(tl.float32), EXACT)
            c = tl.where((step < length)[:, None] & owned, after, c)
    if LAST:
        tl.store(cells + (T.to(tl.int64) * B + row)[:, None] * H + unit[None, :], c, mask=owned)
