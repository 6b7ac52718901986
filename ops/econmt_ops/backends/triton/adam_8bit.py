"""Adam and AdamW with 8-bit moments on a GPU: a matrix in one launch, whose moments never exist in float32 in memory.

The codes are those of `econmt_ops.optimizers.eight_bit`, which defines them. Sizes: R rows, C columns of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.cuda.adam import AdamSettings
from econmt_ops.core.arguments import Update
from econmt_ops.dispatch.device_limits import on_gpu_of

_VALUES = 1024
"""Values of a program."""

_SHIFT = tl.constexpr(20)
"""Bits of a float32 mantissa that a code drops."""

_FIRST, _FIRST_BITS = tl.constexpr(2.0**-16), tl.constexpr(111 << 23)
"""Smallest number of the codes of the first moment, and its bits as a float32."""

_SECOND_BITS = tl.constexpr(95 << 23)
"""Bits of 2^-32, the smallest number of the codes of the second moment."""

_MOST = tl.constexpr(1.875 / 2.0)
_ABOVE = tl.constexpr(1.0 + 1e-6)
_LEAST_SCALE = tl.constexpr(1e-30)
_GOLDEN = tl.constexpr((5.0**0.5 - 1.0) / 2.0)


@triton.jit
def _encode(sizes, most, dither, LEAST_BITS: tl.constexpr, OFFSET: tl.constexpr, MOST: tl.constexpr):
    """Returns codes of sizes (blocks, width) and the scale of each block, whose largest size is ``most`` (blocks,)."""
    scale = most * (_ABOVE / MOST)
    scaled = tl.div_rn(sizes, tl.maximum(scale, _LEAST_SCALE)[:, None]) + OFFSET
    return (scaled.to(tl.int32, bitcast=True) + dither - LEAST_BITS) >> _SHIFT, scale


@triton.jit
def _hashed(bits):
    """Returns the hash of uint32 bits, as `econmt_ops.optimizers.stochastic_rounding`."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _rounded(value, at, step, salt):
    """Rounds values at positions of a parameter as `econmt_ops.optimizers.stochastic_rounding.round_into`."""
    key = _hashed(_hashed(step.to(tl.int32).to(tl.uint32)) ^ salt.to(tl.uint32, bitcast=True))
    noise = _hashed(_hashed(at.to(tl.uint32)) ^ key) & 0xFFFF
    bits = value.to(tl.uint32, bitcast=True)
    cut = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, cut, value).to(tl.bfloat16)


@triton.jit(do_not_specialize=["salt"])
def eight_bit_adam(
    values, gradients, first, first_scales, second, second_scales, step, rate, divisor, skip, squares, bound,
    salt, blocks, columns, count, BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr,
    LOG2: tl.constexpr, EPSILON: tl.constexpr, DECAY: tl.constexpr, DECOUPLED: tl.constexpr,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Updates BLOCKS of the ``count`` blocks of a matrix, each a part of a row with ``blocks`` blocks."""
    if skip is not None:  # noqa: SIM102  decided at compile time
        if tl.load(skip) != 0.0:
            return
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    width = tl.cdiv(columns, blocks)
    column = (block % blocks * width)[:, None] + tl.arange(0, WIDTH)[None, :]
    inside = (tl.arange(0, WIDTH) < width)[None, :] & (column < columns) & (block < count)[:, None]
    at = (block // blocks).to(tl.int64)[:, None] * columns + column
    value = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    if squares is not None:
        tl.store(squares + tl.program_id(0), tl.sum(gradient * gradient))
    code1 = tl.load(first + at, mask=inside, other=0).to(tl.int32)
    code2 = tl.load(second + at, mask=inside, other=0).to(tl.int32)
    scale1 = tl.load(first_scales + block, mask=block < count, other=0.0)[:, None]
    scale2 = tl.load(second_scales + block, mask=block < count, other=0.0)[:, None]

    size1 = ((tl.abs(code1) << _SHIFT) + _FIRST_BITS).to(tl.float32, bitcast=True) - _FIRST
    one = tl.where(code1 < 0, -size1, size1) * scale1
    two = ((code2 << _SHIFT) + _SECOND_BITS).to(tl.float32, bitcast=True) * scale2

    number = tl.load(step).to(tl.float64)
    root = tl.sqrt(1.0 - tl.exp(number * LOG2)).to(tl.float32)
    pace = tl.load(rate)
    if divisor is not None:
        gradient = tl.div_rn(gradient, tl.load(divisor))
    gradient = tl.where(gradient > bound, bound, tl.where(gradient < -bound, -bound, gradient))  # NaN stays
    if DECOUPLED:
        value *= 1.0 - pace * DECAY
    else:
        gradient += value * DECAY
    one = BETA1 * one + (1.0 - BETA1) * gradient
    two = BETA2 * two + (1.0 - BETA2) * gradient * gradient
    pace /= (1.0 - tl.exp(number * LOG1)).to(tl.float32)
    value -= tl.div_rn(pace * one, tl.div_rn(tl.sqrt_rn(two), root) + EPSILON)
    if values.dtype.element_ty == tl.bfloat16:
        value = _rounded(value, at, number, salt)
    tl.store(values + at, value, mask=inside)

    one, two = tl.where(inside, one, 0.0), tl.where(inside, two, 0.0)
    turn = number * _GOLDEN
    dither = ((turn - tl.floor(turn)) * (1 << 20)).to(tl.int32)
    size = tl.abs(one)
    code, scale = _encode(size, tl.max(size, 1), dither, _FIRST_BITS, _FIRST, _MOST - _FIRST)
    tl.store(first + at, tl.where(one < 0, -code, code).to(tl.int8), mask=inside)
    tl.store(first_scales + block, scale, mask=block < count)
    turn += 0.5
    dither = ((turn - tl.floor(turn)) * (1 << 20)).to(tl.int32)
    code, scale = _encode(two, tl.max(two, 1), dither, _SECOND_BITS, 0.0, _MOST)
    tl.store(second + at, tl.maximum(code, 0).to(tl.uint8), mask=inside)
    tl.store(second_scales + block, scale, mask=block < count)


def run(settings: AdamSettings, updates: Sequence[Update], *, norm: bool = False) -> list[Tensor]:
    """Updates contiguous matrices and their moments by gradients of their types, which are left as they are.

    A matrix in bfloat16 is rounded by `econmt_ops.optimizers.stochastic_rounding`; others are float32. The moments are
    the codes and the scales of the first, then of the second moment.

    Returns:
        With ``norm``, for settings without ``skip``, of each gradient sums of squares before it is divided and clipped,
        one a program, float32; otherwise nothing.
    """
    assert not (norm and settings.skip is not None)
    log1, log2 = (math.log(beta) if beta else -math.inf for beta in settings.betas)
    found = []
    for update in updates:
        tensors = [part.flatten(0, -2) for part in (update.values, update.gradient, *update.moments)]
        (rows, columns), blocks = tensors[0].shape, tensors[3].shape[1]
        width = triton.next_power_of_2(triton.cdiv(columns, blocks))
        together = max(1, _VALUES // width)
        programs = triton.cdiv(rows * blocks, together)
        found += [tensors[3].new_empty(programs)] if norm else []
        with on_gpu_of(tensors):
            eight_bit_adam[(programs,)](
                *tensors, update.numbers["step"], settings.rate, settings.divisor, settings.skip, found[-1] if norm
                else None, settings.bound, update.salt, blocks, columns, rows * blocks, BETA1=settings.betas[0],
                BETA2=settings.betas[1], LOG1=log1, LOG2=log2, EPSILON=settings.eps, DECAY=settings.decay,
                DECOUPLED=settings.decoupled, BLOCKS=together, WIDTH=width, num_warps=4,
            )  # fmt: skip
    return found
