"""Kernels of the linear recurrence where there are units enough: each thread walks through the steps of its own.

A thread asks for the steps of the next COUNT steps before it goes through those that are there, so that enough is on
its way from memory at any time; a scan within a tile would do three times the arithmetic and exchange values between
threads. Steps are counted in the order of the walk, see `recurrence_tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton.recurrence_tiles import after, place


@triton.jit
def fetch(
    tensor, batch, stride, row, first, unit, length, hidden, other, COUNT: tl.constexpr, REVERSE: tl.constexpr
):
    """The values (UNITS,) of each of COUNT steps from ``first`` on; ``other`` where there are none."""
    found = ()
    for k in tl.static_range(COUNT):
        step = first + k
        there = (unit < hidden) & (step >= 0) & (step < length)
        at = row * batch + place(step, length, REVERSE) * stride + unit
        found = found + (tl.load(tensor + at, mask=there, other=other),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def put(tensor, value, row, step, unit, length, steps, hidden, REVERSE: tl.constexpr):
    """Writes a step to a contiguous (B, T, H), zeros past the row's length."""
    at = (row * steps + place(step, length, REVERSE)) * hidden + unit
    kept = tl.where(step < length, value, 0.0)
    tl.store(tensor + at, kept.to(tensor.dtype.element_ty), mask=(unit < hidden) & (step < steps))


@triton.jit(do_not_specialize=["steps", "blocks"])
def walk_forward(
    decay, inputs, initial, lengths, outputs, carries, decay_batch, decay_step, inputs_batch, inputs_step, steps,
    blocks, hidden, BLOCK: tl.constexpr, COUNT: tl.constexpr, UNITS: tl.constexpr, REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, KEEPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Outputs (B, T, H), and with KEEPS the state before every BLOCK steps in carries (B, blocks, H)."""
    parts = tl.cdiv(hidden, UNITS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    unit = tl.program_id(0) % parts * UNITS + tl.arange(0, UNITS)
    length = tl.load(lengths + row).to(tl.int64) if HAS_LENGTHS else steps.to(tl.int64)
    state = tl.zeros((UNITS,), ACC)
    if HAS_INITIAL:
        state = tl.load(initial + row * hidden + unit, mask=unit < hidden, other=0.0)
    begin = steps.to(tl.int64) * 0
    a = fetch(decay, decay_batch, decay_step, row, begin, unit, length, hidden, 1.0, COUNT, REVERSE)
    b = fetch(inputs, inputs_batch, inputs_step, row, begin, unit, length, hidden, 0.0, COUNT, REVERSE)
    for first in range(begin, steps, COUNT):
        behind = first + COUNT
        next_a = fetch(decay, decay_batch, decay_step, row, behind, unit, length, hidden, 1.0, COUNT, REVERSE)
        next_b = fetch(
            inputs, inputs_batch, inputs_step, row, behind, unit, length, hidden, 0.0, COUNT, REVERSE
        )
        if KEEPS and first % BLOCK == 0:
            tl.store(carries + (row * blocks + first // BLOCK) * hidden + unit, state, mask=unit < hidden)
        for k in tl.static_range(COUNT):
            state = after(a[k].to(ACC), b[k].to(ACC), state)
            put(outputs, state, row, first + k, unit, length, steps, hidden, REVERSE)
        a, b = next_a, next_b


@triton.jit(do_not_specialize=["steps", "blocks"])
def walk_backward(
    decay, kept, doutputs, initial, lengths, carries, ddecay, dinputs, dinitial, decay_batch, decay_step, kept_batch,
    kept_step, doutputs_batch, doutputs_step, steps, blocks, hidden, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    UNITS: tl.constexpr, REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    AGAIN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradients: delta_i = dh_i + a_{i+1} delta_{i+1}, from the last step to the first.

    kept: the outputs, of which those before each step are read; with AGAIN the inputs, from which and from the carries
    the outputs of a block are made again, in the place where the gradient of the decay will be.
    """
    parts = tl.cdiv(hidden, UNITS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    unit = tl.program_id(0) % parts * UNITS + tl.arange(0, UNITS)
    length = tl.load(lengths + row).to(tl.int64) if HAS_LENGTHS else steps.to(tl.int64)
    begin = tl.zeros((UNITS,), ACC)
    if HAS_INITIAL:
        begin = tl.load(initial + row * hidden + unit, mask=unit < hidden, other=0.0)
    delta = tl.zeros((UNITS,), ACC)
    behind = tl.full((UNITS,), 1.0, ACC)  # the decay of the step behind
    whole = steps.to(tl.int64) * hidden
    last = (tl.cdiv(steps, COUNT) - 1).to(tl.int64) * COUNT
    a = fetch(decay, decay_batch, decay_step, row, last, unit, length, hidden, 1.0, COUNT, REVERSE)
    d = fetch(doutputs, doutputs_batch, doutputs_step, row, last, unit, length, hidden, 0.0, COUNT, REVERSE)
    if not AGAIN:
        h = fetch(kept, kept_batch, kept_step, row, last - 1, unit, length, hidden, 0.0, COUNT, REVERSE)
    for number in range(tl.cdiv(steps, COUNT)):
        first = last - number * COUNT
        before = first - COUNT
        if AGAIN:
            block = first // BLOCK
            if (number == 0) | ((first + COUNT) % BLOCK == 0):
                state = tl.load(
                    carries + (row * blocks + block) * hidden + unit, mask=unit < hidden, other=0.0
                )
                for start in range(block * BLOCK, first + COUNT, COUNT):
                    p = fetch(
                        decay, decay_batch, decay_step, row, start, unit, length, hidden, 1.0, COUNT, REVERSE
                    )
                    e = fetch(
                        kept, kept_batch, kept_step, row, start, unit, length, hidden, 0.0, COUNT, REVERSE
                    )
                    for k in tl.static_range(COUNT):
                        state = after(p[k].to(ACC), e[k].to(ACC), state)
                        put(ddecay, state, row, start + k, unit, length, steps, hidden, REVERSE)
                tl.debug_barrier()  # other threads may read what these have written
            h = fetch(ddecay, whole, hidden, row, first - 1, unit, length, hidden, 0.0, COUNT, REVERSE)
            if first % BLOCK == 0:
                begin = tl.load(
                    carries + (row * blocks + block) * hidden + unit, mask=unit < hidden, other=0.0
                )
        next_a = fetch(decay, decay_batch, decay_step, row, before, unit, length, hidden, 1.0, COUNT, REVERSE)
        next_d = fetch(
            doutputs, doutputs_batch, doutputs_step, row, before, unit, length, hidden, 0.0, COUNT, REVERSE
        )
        if not AGAIN:
            next_h = fetch(
                kept, kept_batch, kept_step, row, before - 1, unit, length, hidden, 0.0, COUNT, REVERSE
            )
        for k in tl.static_range(COUNT - 1, -1, -1):
            step = first + k
            delta = after(behind, d[k].to(ACC), delta)
            state_before = h[k].to(ACC)
            if k == 0:
                is_begin = (first % BLOCK == 0) if AGAIN else (first == 0)
                state_before = tl.where(is_begin, begin.to(ddecay.dtype.element_ty).to(ACC), state_before)
            put(dinputs, delta, row, step, unit, length, steps, hidden, REVERSE)
            put(ddecay, delta * state_before, row, step, unit, length, steps, hidden, REVERSE)
            behind = a[k].to(ACC)
        a, d = next_a, next_d
        if not AGAIN:
            h = next_h
    tl.store(dinitial + row * hidden + unit, tl.where(length > 0, behind * delta, 0.0), mask=unit < hidden)
