"""Kernels of the linear recurrence where there are few units: tiles of steps and units, each scanned on the chip.

A tile reads its steps once and finds what they make of the state before it, h -> P h + e, by an associative scan. Every
tile has a program, and those of the same units hand on what they know: a tile publishes its own P and e; RADIX tiles
make a group, of which the last publishes the state after it. A tile so reads the state after the group before its own,
and the P and e of the tiles before it in its group, always joined in the same order: the result is the same at every
repetition, which the decoupled look-back of Merrill and Garland (2016), where it comes from, does not promise. Programs
begin in the order of their numbers, and those that others wait for have lower ones.

Steps are counted in the order of the walk: step i of a row of n steps is its position i, or n - 1 - i with REVERSE.
"""

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton.exchange import SPINS, arrive, wait


@triton.jit
def join(p, e, q, f):
    """Two parts of a walk, the earlier one first: h -> q (p h + e) + f; an e of zero stays so whatever q is."""
    return p * q, tl.where(e == 0, f, q * e + f)


@triton.jit
def after(p, e, state):
    """p state + e, where a state of zero stays so whatever p is."""
    return tl.where(state == 0, e, p * state + e)


@triton.jit
def place(step, length, REVERSE: tl.constexpr):
    """The position of a step; past a row's length positions are their own steps."""
    return tl.where(step < length, length - 1 - step, step) if REVERSE else step


@triton.jit
def read(
    tensor, batch, stride, row, step, unit, length, hidden, other, REVERSE: tl.constexpr, ACC: tl.constexpr
):
    """The values (STEPS, UNITS) at some steps; ``other`` where there are none."""
    at = row * batch + place(step, length, REVERSE)[:, None] * stride + unit[None, :]
    there = ((step >= 0) & (step < length))[:, None] & (unit < hidden)[None, :]
    return tl.load(tensor + at, mask=there, other=other).to(ACC)


@triton.jit
def write(tensor, value, row, step, unit, length, steps, hidden, REVERSE: tl.constexpr):
    """Writes to a contiguous (B, T, H), zeros past the row's length."""
    at = (row * steps + place(step, length, REVERSE))[:, None] * hidden + unit[None, :]
    there = (step < steps)[:, None] & (unit < hidden)[None, :]
    kept = tl.where((step < length)[:, None], value, 0.0)
    tl.store(tensor + at, kept.to(tensor.dtype.element_ty), mask=there)


@triton.jit
def states_around(p, e, start, number, tiles, group, parts, states, flags, UNITS: tl.constexpr, RADIX: tl.constexpr,
                 WAITS: tl.constexpr):  # fmt: skip
    """The states (UNITS,) before and after a tile of which the number in the order of the walk is given.

    The one after it has the bits that the next tile will find before it.

    Args:
        p, e: (UNITS,), what the tile makes of a state.
        start: (UNITS,), the state before the first tile.
        number, tiles: of the tile, of all of them; group: of units.
        parts: (groups, tiles, 2, UNITS), states (groups, tiles / RADIX rounded up, UNITS): what tiles publish.
        flags: int32, zeros: a counter for each part and then for each state.
        WAITS: False in the interpreter, which runs one program after the other.
    """
    column = tl.arange(0, UNITS)
    supers = (tiles + RADIX - 1) // RADIX
    own, rank = number // RADIX, number % RADIX
    part = (group * tiles + number) * (2 * UNITS) + column
    ends = (rank == RADIX - 1) & (number < tiles - 1)
    if rank < RADIX - 1:
        tl.store(parts + part, p)
        tl.store(parts + part + UNITS, e)
        if WAITS:
            arrive(flags + group * tiles + number)
    flag_of_state = flags + tl.num_programs(0) + group * supers + own
    before = tl.arange(0, RADIX)
    earlier = before < rank
    first = group * tiles + own * RADIX
    patience = 1
    if WAITS:
        left = tl.full((RADIX,), SPINS, tl.int32)
        left = wait(flags + first + tl.where(earlier, before, 0), earlier.to(tl.int32), left)
        patience = tl.min(left, 0)
        if own > 0:
            patience = tl.minimum(patience, wait(flag_of_state - 1, 1, patience))
        tl.debug_barrier()
    at = (first + before)[:, None] * (2 * UNITS) + column[None, :]
    ps = tl.load(parts + at, mask=earlier[:, None], other=1.0)
    es = tl.load(parts + at + UNITS, mask=earlier[:, None], other=0.0)
    # A scan and no reduction, which on a GPU joins parts in another order than theirs.
    mine = (before == rank)[:, None]
    through = tl.associative_scan((tl.where(mine, p[None, :], ps), tl.where(mine, e[None, :], es)), 0, join)
    last = (before == rank - 1)[:, None]
    joined = tl.sum(tl.where(last, through[0], 0.0), 0) + tl.where(rank == 0, 1.0, 0.0)
    added = tl.sum(tl.where(last, through[1], 0.0), 0)
    joined_too = tl.sum(tl.where(mine, through[0], 0.0), 0)
    added_too = tl.sum(tl.where(mine, through[1], 0.0), 0)
    if own > 0:
        start = tl.load(states + (group * supers + own - 1) * UNITS + column)
    state, next_state = after(joined, added, start), after(joined_too, added_too, start)
    if WAITS:
        state = tl.where(patience > 0, state, float("nan"))
        next_state = tl.where(patience > 0, next_state, float("nan"))
    if ends:
        tl.store(states + (group * supers + own) * UNITS + column, next_state)
        if WAITS:
            arrive(flag_of_state)
    return state, next_state


@triton.jit(do_not_specialize=["steps", "tiles"])
def tile_forward(
    decay, inputs, initial, lengths, outputs, carries, parts, states, flags,
    decay_batch, decay_step, inputs_batch, inputs_step, steps, tiles, hidden,
    STEPS: tl.constexpr, UNITS: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, KEEPS: tl.constexpr, WAITS: tl.constexpr, ACC: tl.constexpr,
    RADIX: tl.constexpr,
):  # fmt: skip
    """Outputs (B, T, H), and with KEEPS the state before every tile in carries (B, tiles, H)."""
    blocks = tl.cdiv(hidden, UNITS)
    groups = tl.num_programs(0) // tiles
    group = tl.program_id(0) % groups
    tile = tl.program_id(0) // groups
    row = (group // blocks).to(tl.int64)
    unit = group % blocks * UNITS + tl.arange(0, UNITS)
    length = tl.load(lengths + row).to(tl.int64) if HAS_LENGTHS else steps.to(tl.int64)
    index = tl.arange(0, STEPS).to(tl.int64)
    state = tl.zeros((UNITS,), ACC)
    if HAS_INITIAL:
        state = tl.load(initial + row * hidden + unit, mask=unit < hidden, other=0.0)
    step = tile * STEPS + index
    a = read(decay, decay_batch, decay_step, row, step, unit, length, hidden, 1.0, REVERSE, ACC)
    b = read(inputs, inputs_batch, inputs_step, row, step, unit, length, hidden, 0.0, REVERSE, ACC)
    p, e = tl.associative_scan((a, b), 0, join)
    is_last = (index == STEPS - 1)[:, None]
    own_p, own_e = tl.sum(tl.where(is_last, p, 0.0), 0), tl.sum(tl.where(is_last, e, 0.0), 0)
    state, next_state = states_around(
        own_p, own_e, state, tile, tiles, group, parts, states, flags, UNITS, RADIX, WAITS
    )
    if KEEPS:
        tl.store(carries + (row * tiles + tile) * hidden + unit, state, mask=unit < hidden)
    found = tl.where(is_last, next_state[None, :], after(p, e, state[None, :]))
    write(outputs, found, row, step, unit, length, steps, hidden, REVERSE)


@triton.jit
def states_again(
    decay, kept, workspace, carry, decay_batch, decay_step, kept_batch, kept_step, row, step, unit, length, steps,
    hidden, REVERSE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Writes the states of a tile, rounded, to a workspace (B, T, H), which this program alone uses there."""
    a = read(decay, decay_batch, decay_step, row, step, unit, length, hidden, 1.0, REVERSE, ACC)
    b = read(kept, kept_batch, kept_step, row, step, unit, length, hidden, 0.0, REVERSE, ACC)
    p, e = tl.associative_scan((a, b), 0, join)
    write(workspace, after(p, e, carry[None, :]), row, step, unit, length, steps, hidden, REVERSE)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["steps", "tiles"])
def tile_backward(
    decay, kept, doutputs, initial, lengths, carries, ddecay, dinputs, dinitial, parts, states, flags,
    decay_batch, decay_step, kept_batch, kept_step, doutputs_batch, doutputs_step, steps, tiles, hidden,
    STEPS: tl.constexpr, UNITS: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, AGAIN: tl.constexpr, WAITS: tl.constexpr, ACC: tl.constexpr,
    RADIX: tl.constexpr,
):  # fmt: skip
    """The gradients: delta_i = dh_i + a_{i+1} delta_{i+1}, from the last tile to the first.

    kept: the outputs, of which those before each step are read; with AGAIN the inputs, from which and from the carries
    the outputs are made again, in the place where the gradient of the decay will be.
    """
    blocks = tl.cdiv(hidden, UNITS)
    groups = tl.num_programs(0) // tiles
    group = tl.program_id(0) % groups
    number = tl.program_id(0) // groups
    tile = tiles - 1 - number
    row = (group // blocks).to(tl.int64)
    unit = group % blocks * UNITS + tl.arange(0, UNITS)
    length = tl.load(lengths + row).to(tl.int64) if HAS_LENGTHS else steps.to(tl.int64)
    index = tl.arange(0, STEPS).to(tl.int64)
    begin = tl.zeros((UNITS,), ACC)
    if HAS_INITIAL:
        begin = tl.load(initial + row * hidden + unit, mask=unit < hidden, other=0.0)
    step = tile * STEPS + index
    a = read(decay, decay_batch, decay_step, row, step + 1, unit, length, hidden, 1.0, REVERSE, ACC)
    d = read(doutputs, doutputs_batch, doutputs_step, row, step, unit, length, hidden, 0.0, REVERSE, ACC)
    if AGAIN:
        begin = tl.load(carries + (row * tiles + tile) * hidden + unit, mask=unit < hidden, other=0.0)
        states_again(decay, kept, ddecay, begin, decay_batch, decay_step, kept_batch, kept_step, row, step, unit,
                     length, steps, hidden, REVERSE, ACC)  # fmt: skip
        h = read(ddecay, steps.to(tl.int64) * hidden, hidden, row, tl.where(index > 0, step - 1, -1), unit, length,
                 hidden, 0.0, REVERSE, ACC)  # fmt: skip
        tl.debug_barrier()
        no_output = (index == 0)[:, None]
    else:
        h = read(kept, kept_batch, kept_step, row, step - 1, unit, length, hidden, 0.0, REVERSE, ACC)
        no_output = (step == 0)[:, None]
    h = tl.where(no_output, begin.to(ddecay.dtype.element_ty).to(ACC)[None, :], h)
    p, e = tl.associative_scan((a, d), 0, join, reverse=True)
    is_first = (index == 0)[:, None]
    own_p, own_e = tl.sum(tl.where(is_first, p, 0.0), 0), tl.sum(tl.where(is_first, e, 0.0), 0)
    delta = tl.zeros((UNITS,), ACC)
    delta, _ = states_around(
        own_p, own_e, delta, number, tiles, group, parts, states, flags, UNITS, RADIX, WAITS
    )
    deltas = after(p, e, delta[None, :])
    write(dinputs, deltas, row, step, unit, length, steps, hidden, REVERSE)
    write(ddecay, deltas * h, row, step, unit, length, steps, hidden, REVERSE)
    if tile == 0:
        at = row * decay_batch + place(length * 0, length, REVERSE) * decay_step + unit
        a_first = tl.load(decay + at, mask=(unit < hidden) & (length > 0), other=0.0).to(ACC)
        tl.store(dinitial + row * hidden + unit, a_first * after(own_p, own_e, delta), mask=unit < hidden)
