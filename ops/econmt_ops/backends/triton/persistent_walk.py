"""Rows, positions and states of a walk over the steps, for the persistent kernels of LSTM layers.

Sizes and walks are those of `persistent_kernels`. With RING there, float32 values are kept in float16, multiplied by
powers of two for each row of a step: slots (D, T + 1, B) int32 hold the bits of a bound of each row at each step, in
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton.persistent_product import power_of_two

_EXPONENT = tl.constexpr(-6.0)
"""Exponent to which a row's largest number so far is brought in float16: the row may grow by 2^22 in a step."""
UNIT_EXPONENT = tl.constexpr(14.0)
"""Least exponent of the powers of two by which h of an LSTM is multiplied, which never exceeds 1."""
LEAST_EXPONENT = tl.constexpr(-126.0)
"""Least exponent of the powers of two by which gradients, and h of a GRU, are multiplied."""


@triton.jit
def row_lengths(lengths, rows, there, T, HAS_LENGTHS: tl.constexpr):
    """Returns the length of each row; 0 for rows that do not exist."""
    if HAS_LENGTHS:
        return tl.load(lengths + rows, mask=there, other=0).to(tl.int32)
    else:
        return tl.where(there, T, 0)


@triton.jit
def group_rows(
    lengths, group, span, B, T, ROWS: tl.constexpr, SPLIT: tl.constexpr, HAS_LENGTHS: tl.constexpr
):
    """Returns, for a tile's SPLIT ROWS rows, the row of the batch, a mask of rows in this group, and the length.

    Rows beyond the group map to the next group's rows, at distinct addresses, so that no row is read repeatedly; their
    length is 0.
    """
    offset = tl.arange(0, SPLIT * ROWS) % ROWS
    row = tl.minimum(group * span + offset, B - 1)
    there = (offset < span) & (group * span + offset < B)
    return row, there, row_lengths(lengths, row, there, T, HAS_LENGTHS)


@triton.jit
def positions_at(step, length, backwards):
    """Returns the position of rows of these lengths at a step of the walk; padding is visited in ascending order."""
    return tl.where((backwards != 0) & (step < length), length - 1 - step, step)


@triton.jit
def places_at(step, length, row, backwards, T, B, direction):
    """Returns the rows (ROWS, 1) of tensors (D, T, B) at a step of the walk."""
    return ((direction * T + positions_at(step, length, backwards)).to(tl.int64) * B + row)[:, None]


@triton.jit
def begins_anew(resets, step, length, row, backwards, B, HAS_RESETS: tl.constexpr):
    """Returns True for rows whose state begins anew at a step of the walk; (1,) where none can."""
    if HAS_RESETS:
        position = positions_at(step, length, backwards) + backwards
        inside = (step < length) & (position < length)
        return tl.load(resets + position.to(tl.int64) * B + row, mask=inside, other=0) != 0
    else:
        return tl.full((1,), False, tl.int1)


@triton.jit
def exchange_rows(step, length, row, backwards, B, direction, RING: tl.constexpr):
    """Returns the rows of the exchange tensor that hold a step: its positions, or slots of a ring of two steps."""
    if RING:
        return ((direction * 2 + step % 2) * B + row).to(tl.int64)
    else:
        return positions_at(step, length, backwards).to(tl.int64) * B + row


@triton.jit
def place_of(first_direction, first_group, groups, PARTS: tl.constexpr):
    """Returns this program's part of the units, group of rows, and direction."""
    program = tl.program_id(0)
    group = first_group + program // PARTS % groups
    return program % PARTS, group, first_direction + program // (PARTS * groups)


@triton.jit
def load_state(where, mask, ROWS: tl.constexpr, UNITS: tl.constexpr, GIVEN: tl.constexpr):
    """Loads a state (ROWS, UNITS) in float32; zeros if none is given."""
    if GIVEN:
        return tl.load(where, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros((ROWS, UNITS), tl.float32)


@triton.jit
def load_gates(where, mask, H: tl.constexpr):
    """Loads four values in float32, one per gate."""
    i = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(where + H, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(where + 2 * H, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(where + 3 * H, mask=mask, other=0.0).to(tl.float32)
    return i, f, g, o


@triton.jit
def store_gates(where, i, f, g, o, mask, H: tl.constexpr):
    """Stores four values, one per gate."""
    kind = where.dtype.element_ty
    tl.store(where, i.to(kind), mask=mask)
    tl.store(where + H, f.to(kind), mask=mask)
    tl.store(where + 2 * H, g.to(kind), mask=mask)
    tl.store(where + 3 * H, o.to(kind), mask=mask)


@triton.jit
def share_of_g(sums, step, length, row, unit, owned, backwards, T, B, direction, H: tl.constexpr,
               GRU: tl.constexpr):  # fmt: skip
    """Returns the size of the inputs' share of g, or of both shares of n, at a step; zero beyond the length."""
    place = places_at(step, length, row, backwards, T, B, direction) * (4 * H)
    mask = (step < length)[:, None] & owned
    share = tl.abs(tl.load(sums + place + 2 * H + unit[None, :], mask=mask, other=0.0))
    if GRU:
        share += tl.abs(tl.load(sums + place + 3 * H + unit[None, :], mask=mask, other=0.0))
    return share


@triton.jit
def gate_parts(shares, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Returns the gates' parts (ROWS, UNITS) of a product (ROWS, 4 UNITS); the gates of a unit are adjacent in it."""
    even, odd = tl.split(tl.reshape(shares, (ROWS, UNITS, 2, 2)))
    share_i, share_g = tl.split(even)
    share_f, share_o = tl.split(odd)
    return share_i, share_f, share_g, share_o


@triton.jit
def _bound(slots, step, row, T, B, direction):
    return slots + (direction * (T + 1) + step).to(tl.int64) * B + row


@triton.jit
def raise_bound(slots, step, row, there, T, B, direction, values):
    """Raises the slots of a step's rows to the largest of the values (ROWS, UNITS), which are not negative."""
    # Floating point numbers without a sign are in the order of their bits; NaN is above all others.
    bits = tl.max(values.to(tl.int32, bitcast=True), 1)
    tl.atomic_max(_bound(slots, step, row, T, B, direction), bits, mask=there, sem="relaxed")


@triton.jit
def row_factor(slots, step, row, there, T, B, direction, LEAST: tl.constexpr):
    """Returns the powers of two (ROWS, 1) by which the rows of a step are multiplied, at least 2^LEAST."""
    place = _bound(slots, step, row, T, B, direction)
    largest = tl.load(place, mask=there, other=0, cache_modifier=".cg").to(tl.float32, bitcast=True)
    return tl.maximum(power_of_two(largest, _EXPONENT), tl.exp2(LEAST))[:, None]


@triton.jit
def inverse_factors(where, mask, H: tl.constexpr, GIVEN: tl.constexpr):
    """Returns the inverse factors (1, UNITS) of the units' four rows of the recurrent matrix; 1 if none are given."""
    if GIVEN:
        i = tl.load(where, mask=mask, other=1.0)
        f = tl.load(where + H, mask=mask, other=1.0)
        g = tl.load(where + 2 * H, mask=mask, other=1.0)
        o = tl.load(where + 3 * H, mask=mask, other=1.0)
        return 1 / i[None, :], 1 / f[None, :], 1 / g[None, :], 1 / o[None, :]
    else:
        return 1.0, 1.0, 1.0, 1.0
