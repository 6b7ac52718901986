"""Powers of two with which persistent kernels keep float32 values in float16, for each row of a step; see `RING` there.

Slots (D, T + 1, B) int32 hold the bits of a bound of each row at each step, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton.persistent_product import power_of_two

_EXPONENT = tl.constexpr(-6.0)
"""Exponent to which a row's largest number so far is brought in float16: the row may grow by 2^22 in a step."""
UNIT_EXPONENT = tl.constexpr(14.0)
"""Least exponent of the powers of two by which h is multiplied, which never exceeds 1."""
LEAST_EXPONENT = tl.constexpr(-126.0)
"""Least exponent of the powers of two by which gradients are multiplied."""


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
