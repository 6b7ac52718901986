"""Kernels of the linear recurrence: each thread runs steps of a unit of its own.

If there are enough units, a program runs all steps of its units. Its threads hold the values of COUNT steps in
registers or in flight from memory: after each step they prefetch the values of the step COUNT further. Such a program
is one warp, and a multiprocessor has few of them, so the number of instructions per step decides: addresses advance by
one addition, and steps beyond a row's length have a loop of their own.
Otherwise (TILED) a program handles a tile of BLOCK steps, kept in registers so that memory is read once: it computes
the tile's map h -> P h + e, publishes it, obtains the state before the tile, and runs its steps.

Programs of the same units pass on their maps in a look-back of three levels. A tile publishes its own P and e; the last
of RADIX tiles, a group, publishes the map of the group; the last of RADIX groups publishes the state after them. A tile
therefore waits for few others in sequence however many there are, and maps are always joined in the same order: results
are deterministic, unlike those of the decoupled look-back of Merrill and Garland (2016), on which it is based. Programs
start in the order of their numbers, and wait only for lower ones.

Steps are counted in processing order, the order of the walk: step i of a row of n steps is at position i, or n - 1 - i
with REVERSE.
"""

# mypy: disable-error-code=assignment

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton.exchange import SPINS, arrive, wait


@triton.jit
def join(p, e, q, f):
    """Composes two maps, the earlier first: h -> q (p h + e) + f; if e is 0, q e is 0 even for an infinite q."""
    return p * q, tl.where(e == 0, f, q * e + f)


@triton.jit
def after(p, e, state):
    """Returns p state + e; if the state is 0, p state is 0 even for an infinite p."""
    return tl.where(state == 0, e, p * state + e)


@triton.jit
def place(step, length, REVERSE: tl.constexpr):
    """Returns the position of a step; steps at or beyond a row's length are their own positions."""
    return tl.where(step < length, length - 1 - step, step) if REVERSE else step


@triton.jit
def prefix(p, e, first, rank, parts, flags, UNITS: tl.constexpr, RADIX: tl.constexpr, WAITS: tl.constexpr):
    """Returns the map of the parts before this one, and that map joined with this part, (UNITS,) each.

    Args:
        p, e: this part. first: number of the first part. rank: number of this part, counted from the first.
        parts: (., 2, UNITS), all parts. flags: a counter per part.

    Returns:
        P and e without and with this part, and 0 if a wait timed out.
    """
    column, before = tl.arange(0, UNITS), tl.arange(0, RADIX)
    earlier = before < rank
    patience = 1
    if WAITS:
        left = tl.full((RADIX,), SPINS, tl.int32)
        left = wait(flags + first + tl.where(earlier, before, 0), earlier.to(tl.int32), left)
        patience = tl.min(left, 0)
        tl.debug_barrier()
    at = parts + first * (2 * UNITS) + column
    p_before, e_before = tl.full((UNITS,), 1.0, p.dtype), tl.zeros((UNITS,), e.dtype)
    for k in tl.static_range(RADIX - 1):
        q = tl.load(at + k * (2 * UNITS), mask=k < rank, other=1.0)
        f = tl.load(at + k * (2 * UNITS) + UNITS, mask=k < rank, other=0.0)
        p_before, e_before = join(p_before, e_before, q, f)
    p_with, e_with = join(p_before, e_before, p, e)
    return p_before, e_before, p_with, e_with, patience


@triton.jit
def publish(p, e, number, parts, flags, UNITS: tl.constexpr, WAITS: tl.constexpr):
    """Stores a part where later programs can read it, and sets its flag."""
    at = parts + number * (2 * UNITS) + tl.arange(0, UNITS)
    tl.store(at, p)
    tl.store(at + UNITS, e)
    if WAITS:
        arrive(flags + number)


@triton.jit
def states_around(p, e, start, number, tiles, units, parts, states, flags, UNITS: tl.constexpr, RADIX: tl.constexpr,
                  WAITS: tl.constexpr):  # fmt: skip
    """Returns the states (UNITS,) before and after a tile, given its number in the order of the walk.

    The state after it is bitwise the one that the next tile obtains as the state before it.

    Args:
        p, e: (UNITS,), the map of the tile.
        start: (UNITS,), the state before the first tile.
        number, tiles: number of the tile, and of all tiles; units: index of the program's units.
        parts: (., 2, UNITS), for all units the maps of tiles, then of groups; states: (., UNITS) after RADIX groups.
        flags: int32, zeros: a counter per part, then per state.
        WAITS: False in the interpreter, which runs programs one after the other.
    """
    column = tl.arange(0, UNITS)
    groups = tl.cdiv(tiles, RADIX)
    tops = tl.cdiv(groups, RADIX)
    every = (tl.num_programs(0) // tiles) * (
        tiles + groups
    )  # the flags of the states follow those of the parts
    group, rank = number // RADIX, number % RADIX
    top, group_rank = group // RADIX, group % RADIX
    ends_group = rank == RADIX - 1
    first = units * (tiles + groups)
    if rank < RADIX - 1:
        publish(p, e, first + number, parts, flags, UNITS, WAITS)
    p_before, e_before, p_with, e_with, patience = prefix(
        p, e, first + group * RADIX, rank, parts, flags, UNITS, RADIX, WAITS
    )
    if ends_group & (group_rank < RADIX - 1):
        publish(p_with, e_with, first + tiles + group, parts, flags, UNITS, WAITS)
    p_group, e_group, p_too, e_too, patience_too = prefix(
        p_with, e_with, first + tiles + top * RADIX, group_rank, parts, flags, UNITS, RADIX, WAITS
    )
    flag = flags + every + units * tops + top
    if top > 0:
        if WAITS:
            patience_too = tl.minimum(patience_too, wait(flag - 1, 1, SPINS))
            tl.debug_barrier()
        start = tl.load(states + (units * tops + top - 1) * UNITS + column)
    own = after(p_group, e_group, start)
    state = after(p_before, e_before, own)
    next_state = tl.where(ends_group, after(p_too, e_too, start), after(p_with, e_with, own))
    if WAITS:
        waited = tl.minimum(patience, patience_too) > 0
        state, next_state = tl.where(waited, state, float("nan")), tl.where(waited, next_state, float("nan"))
    if ends_group & (group_rank == RADIX - 1):
        tl.store(states + (units * tops + top) * UNITS + column, next_state)
        if WAITS:
            arrive(flag)
    return state, next_state


@triton.jit
def line_of(at, stride, length, last: tl.constexpr, REVERSE: tl.constexpr):
    """Returns pointers to a row's first step, or with ``last`` its last, and the stride to the next step.

    The next step is the following one in a walk that starts there and covers all steps.
    """
    wide = stride + tl.zeros((), tl.int64)
    end = at + (length - 1) * wide
    if last == REVERSE:
        return at, wide
    else:
        return end, -wide


@triton.jit
def fill(at, stride, first, steps, inside, dtype: tl.constexpr, UNITS: tl.constexpr):
    """Writes zeros at the positions from ``first`` on, beyond a row's length."""
    nothing = tl.zeros((UNITS,), dtype)
    for step in range(first, steps):
        tl.store(at + (step + tl.zeros((), tl.int64)) * stride, nothing, mask=inside)


@triton.jit
def begun(at, stride, count, inside, other, COUNT: tl.constexpr):
    """Loads the first COUNT steps from ``at`` on, ``other`` from step ``count`` on; returns the next pointers too."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (tl.load(at, mask=inside & (k < count), other=other),)
        at += stride
    return found, at


@triton.jit
def walk(
    a_at, a_step, b_at, b_step, made_at, state, length, steps, hidden, inside, COUNT: tl.constexpr, UNITS: tl.constexpr,
    REVERSE: tl.constexpr, HAS_LENGTHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Writes the states of all steps of a row."""
    if HAS_LENGTHS:
        fill(made_at, hidden, length, steps, inside, made_at.dtype.element_ty, UNITS)
    a_at, a_step = line_of(a_at, a_step, length, False, REVERSE)
    b_at, b_step = line_of(b_at, b_step, length, False, REVERSE)
    made_at, made_step = line_of(made_at, hidden, length, False, REVERSE)
    a, a_at = begun(a_at, a_step, length, inside, 1.0, COUNT)
    b, b_at = begun(b_at, b_step, length, inside, 0.0, COUNT)
    for first in range(0, length, COUNT):
        left = length - first
        next_a, next_b = (), ()
        for k in tl.static_range(COUNT):
            state = after(a[k].to(ACC), b[k].to(ACC), state)
            tl.store(made_at, state.to(made_at.dtype.element_ty), mask=inside & (k < left))
            next_a = next_a + (tl.load(a_at, mask=inside & (COUNT + k < left), other=1.0),)
            next_b = next_b + (tl.load(b_at, mask=inside & (COUNT + k < left), other=0.0),)
            a_at += a_step
            b_at += b_step
            made_at += made_step
        a, b = next_a, next_b


@triton.jit
def walk_back_once(
    a_at, a_step, d_at, d_step, kept_at, kept_step, ddecay_at, dinputs_at, begin, length, steps, hidden, inside,
    COUNT: tl.constexpr, UNITS: tl.constexpr, REVERSE: tl.constexpr, HAS_LENGTHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Runs :func:`go_back` for all steps of a row, given its outputs; ``begin`` is the state before the first step."""
    if HAS_LENGTHS:
        fill(ddecay_at, hidden, length, steps, inside, ddecay_at.dtype.element_ty, UNITS)
        fill(dinputs_at, hidden, length, steps, inside, ddecay_at.dtype.element_ty, UNITS)
    a_at, a_step = line_of(a_at, a_step, length, True, REVERSE)
    d_at, d_step = line_of(d_at, d_step, length, True, REVERSE)
    h_at, h_step = line_of(kept_at, kept_step, length, True, REVERSE)
    ddecay_at, made_step = line_of(ddecay_at, hidden, length, True, REVERSE)
    dinputs_at, _ = line_of(dinputs_at, hidden, length, True, REVERSE)
    h_at += h_step  # the output of the previous step
    begin = begin.to(kept_at.dtype.element_ty)
    a, a_at = begun(a_at, a_step, length, inside, 1.0, COUNT)
    d, d_at = begun(d_at, d_step, length, inside, 0.0, COUNT)
    h, h_at = begun(h_at, h_step, length - 1, inside, begin, COUNT)
    behind, delta = tl.full((UNITS,), 1.0, ACC), tl.zeros((UNITS,), ACC)
    for first in range(0, length, COUNT):
        left = length - first
        next_a, next_d, next_h = (), (), ()
        for k in tl.static_range(COUNT):
            there = k < left
            delta = tl.where(there, after(behind, d[k].to(ACC), delta), delta)
            behind = tl.where(there, a[k].to(ACC), behind)
            tl.store(dinputs_at, delta.to(dinputs_at.dtype.element_ty), mask=inside & there)
            product = delta * h[k].to(ACC)
            tl.store(ddecay_at, product.to(ddecay_at.dtype.element_ty), mask=inside & there)
            next_a = next_a + (tl.load(a_at, mask=inside & (COUNT + k < left), other=1.0),)
            next_d = next_d + (tl.load(d_at, mask=inside & (COUNT + k < left), other=0.0),)
            next_h = next_h + (tl.load(h_at, mask=inside & (COUNT + k + 1 < left), other=begin),)
            a_at += a_step
            d_at += d_step
            h_at += h_step
            dinputs_at += made_step
            ddecay_at += made_step
        a, d, h = next_a, next_d, next_h
    return behind, delta


@triton.jit(do_not_specialize=["steps", "blocks"])
def recurrence_forward(
    decay, inputs, initial, lengths, outputs, parts, states, flags, decay_batch, decay_step, inputs_batch, inputs_step,
    steps, blocks, hidden, BLOCK: tl.constexpr, COUNT: tl.constexpr, UNITS: tl.constexpr, REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, TILED: tl.constexpr, RADIX: tl.constexpr,
    WAITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Computes outputs (B, T, H)."""
    programs = tl.num_programs(0) // blocks if TILED else tl.num_programs(0)
    units, tile = tl.program_id(0) % programs, tl.program_id(0) // programs
    of_row = tl.cdiv(hidden, UNITS)
    row = (units // of_row).to(tl.int64)
    unit = units % of_row * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    length = tl.load(lengths + row).to(tl.int64) if HAS_LENGTHS else steps.to(tl.int64)
    a_at, b_at = decay + row * decay_batch + unit, inputs + row * inputs_batch + unit
    outputs_at = outputs + row * steps * hidden + unit
    state = tl.zeros((UNITS,), ACC)
    if HAS_INITIAL:
        state = tl.load(initial + row * hidden + unit, mask=inside, other=0.0)
    start = tile.to(tl.int64) * BLOCK
    stop = start + BLOCK if TILED else steps.to(tl.int64)
    live = tl.minimum(stop, length)
    if TILED:
        count = tl.minimum(live - start, BLOCK).to(tl.int32)
        a_at, a_step = line_of(a_at, decay_step, length, False, REVERSE)
        b_at, b_step = line_of(b_at, inputs_step, length, False, REVERSE)
        a, _ = begun(a_at + start * a_step, a_step, count, inside, 1.0, BLOCK)
        b, _ = begun(b_at + start * b_step, b_step, count, inside, 0.0, BLOCK)
        p, e = tl.full((UNITS,), 1.0, ACC), tl.zeros((UNITS,), ACC)
        for k in tl.static_range(BLOCK):
            p, e = join(p, e, a[k].to(ACC), b[k].to(ACC))
        state, next_state = states_around(
            p, e, state, tile, blocks, units, parts, states, flags, UNITS, RADIX, WAITS
        )
        if HAS_LENGTHS:
            end = tl.minimum(stop, steps)
            fill(outputs_at, hidden, tl.maximum(start, length), end, inside, outputs.dtype.element_ty, UNITS)
        made_at, made_step = line_of(outputs_at, hidden, length, False, REVERSE)
        made_at += start * made_step
        for k in tl.static_range(BLOCK):
            state = after(a[k].to(ACC), b[k].to(ACC), state)
            if k == BLOCK - 1:
                state = next_state
            tl.store(made_at, state.to(outputs.dtype.element_ty), mask=inside & (k < count))
            made_at += made_step
    else:
        walk(
            a_at, decay_step, b_at, inputs_step, outputs_at, state, length.to(tl.int32), steps, hidden, inside, COUNT,
            UNITS, REVERSE, HAS_LENGTHS, ACC,
        )  # fmt: skip


@triton.jit
def go_back(
    a, d, h, behind, delta, begin, begins, count, ddecay_at, dinputs_at, made_step, inside, COUNT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of COUNT steps, last step first, and returns decay and delta of the first step.

    h: the outputs before the steps; where ``begins``, the one before the first is ``begin``, rounded like the outputs.
    count: steps of the row, of which the others are beyond its length. ddecay_at, dinputs_at: the first step's.
    """
    ddecay_at += (COUNT - 1) * made_step
    dinputs_at += (COUNT - 1) * made_step
    for k in tl.static_range(COUNT - 1, -1, -1):
        delta = after(behind, d[k].to(ACC), delta)
        before = h[k].to(ACC)
        if k == 0:
            before = tl.where(begins, begin.to(ddecay_at.dtype.element_ty).to(ACC), before)
        there = inside & (k < count)
        tl.store(dinputs_at, delta.to(dinputs_at.dtype.element_ty), mask=there)
        tl.store(ddecay_at, (delta * before).to(ddecay_at.dtype.element_ty), mask=there)
        behind = a[k].to(ACC)
        ddecay_at -= made_step
        dinputs_at -= made_step
    return behind, delta


@triton.jit(do_not_specialize=["steps", "blocks"])
def recurrence_backward(
    decay, kept, doutputs, initial, lengths, ddecay, dinputs, dinitial, parts, states, flags, decay_batch, decay_step,
    kept_batch, kept_step, doutputs_batch, doutputs_step, steps, blocks, hidden, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, UNITS: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, TILED: tl.constexpr, RADIX: tl.constexpr, WAITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Computes the gradients: delta_i = dh_i + a_{i+1} delta_{i+1}, from the last step to the first.

    kept: the outputs, of which the one before each step is read.
    """
    programs = tl.num_programs(0) // blocks if TILED else tl.num_programs(0)
    units, number = tl.program_id(0) % programs, tl.program_id(0) // programs
    of_row = tl.cdiv(hidden, UNITS)
    row = (units // of_row).to(tl.int64)
    unit = units % of_row * UNITS + tl.arange(0, UNITS)
    inside = unit < hidden
    length = tl.load(lengths + row).to(tl.int64) if HAS_LENGTHS else steps.to(tl.int64)
    a_at, d_at = decay + row * decay_batch + unit, doutputs + row * doutputs_batch + unit
    made = row * steps * hidden + unit
    kept_at = kept + row * kept_batch + unit
    begin = tl.zeros((UNITS,), ACC)
    if HAS_INITIAL:
        begin = tl.load(initial + row * hidden + unit, mask=inside, other=0.0)
    start = (blocks - 1 - number).to(tl.int64) * BLOCK if TILED else steps.to(tl.int64) * 0
    stop = start + BLOCK if TILED else steps.to(tl.int64)
    live = tl.minimum(stop, length)
    delta = tl.zeros((UNITS,), ACC)
    if TILED:
        following = a_at + place(stop, length, REVERSE) * decay_step
        behind = tl.load(following, mask=inside & (stop < length), other=1.0).to(
            ACC
        )  # decay of the following step
        count = tl.minimum(live - start, BLOCK).to(tl.int32)
        a_at, a_step = line_of(a_at, decay_step, length, False, REVERSE)
        d_at, d_step = line_of(d_at, doutputs_step, length, False, REVERSE)
        h_at, h_step = line_of(kept_at, kept_step, length, False, REVERSE)
        a, _ = begun(a_at + start * a_step, a_step, count, inside, 1.0, BLOCK)
        d, _ = begun(d_at + start * d_step, d_step, count, inside, 0.0, BLOCK)
        h_at += start * h_step
        p, e, next_decay = tl.full((UNITS,), 1.0, ACC), delta, behind
        for k in tl.static_range(BLOCK - 1, -1, -1):
            p, e = join(p, e, next_decay, d[k].to(ACC))
            next_decay = a[k].to(ACC)
        before = tl.load(h_at - h_step, mask=inside & (start > 0) & (count > 0), other=0.0)
        h, _ = begun(h_at, h_step, count - 1, inside, 0.0, BLOCK - 1)
        h = (before,) + h
        delta, _ = states_around(
            p, e, delta, number, blocks, units, parts, states, flags, UNITS, RADIX, WAITS
        )
        if HAS_LENGTHS:
            beyond, end = tl.maximum(start, length), tl.minimum(stop, steps)
            fill(ddecay + made, hidden, beyond, end, inside, ddecay.dtype.element_ty, UNITS)
            fill(dinputs + made, hidden, beyond, end, inside, ddecay.dtype.element_ty, UNITS)
        ddecay_at, made_step = line_of(ddecay + made, hidden, length, False, REVERSE)
        dinputs_at, _ = line_of(dinputs + made, hidden, length, False, REVERSE)
        behind, delta = go_back(
            a, d, h, behind, delta, begin, start == 0, count, ddecay_at + start * made_step,
            dinputs_at + start * made_step, made_step, inside, BLOCK, ACC,
        )  # fmt: skip
    else:
        behind, delta = walk_back_once(
            a_at, decay_step, d_at, doutputs_step, kept_at, kept_step, ddecay + made, dinputs + made, begin,
            length.to(tl.int32), steps, hidden, inside, COUNT, UNITS, REVERSE, HAS_LENGTHS, ACC,
        )  # fmt: skip
    if start == 0:
        tl.store(dinitial + row * hidden + unit, tl.where(length > 0, behind * delta, 0.0), mask=inside)
