"""Losses of a chunk of logits, their gradient in place of the logits, and the sum of its rows.

The equations are those of `econmt_ops.backends.losses`. Sizes: C rows of a chunk, V vocabulary, W >= V columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.triton.layer_kernels import PARTIALS, column_sums, counters_of_sums

_WARPS = 8

_VALUES = 8192
"""Values of a row that a program handles at once."""

_WHOLE = 16384
"""Values of a row, at most, that a program holds in its registers, so that it reads them once."""


@triton.jit
def _exponential(value, shift, PRECISE: tl.constexpr):
    """Computes exp(value - shift), by one fused multiply-add and exp2 where 16-bit inputs hide its rounding."""
    if PRECISE:
        return tl.exp(value - shift)
    return tl.exp2(value * 1.4426950408889634 - shift * 1.4426950408889634)


@triton.jit
def _join(lanes, value, valid, PRECISE: tl.constexpr, SMOOTH: tl.constexpr, MASKED: tl.constexpr):
    """Updates running maximum, sum of exponentials and sum per lane with values (PARTS, LANES), masked by ``valid``."""
    largest, total, plain = lanes
    if MASKED:
        if SMOOTH:
            plain += tl.sum(tl.where(valid, value, 0.0), 0)
        value = tl.where(valid, value, float("-inf"))
    elif SMOOTH:
        plain += tl.sum(value, 0)
    larger = tl.maximum(largest, tl.max(value, 0))
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    total *= _exponential(largest, shift, PRECISE)
    total += tl.sum(_exponential(value, shift[None, :], PRECISE), 0)
    return larger, total, plain


@triton.jit
def sums_of_row(row, SMOOTH: tl.constexpr, PRECISE: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr):
    """Returns the maximum of a row of logits, the sum of exp(logit - maximum) and, with SMOOTH, the sum of the logits.

    Each lane has a running maximum and sum; the lane of a value is its column modulo LANES, so that lanes are combined
    only at the end. The last values of a row are loaded up to the stride, because whole rows load faster. Ignored rows
    are mostly not read; their results are replaced by zeros.

    Args:
        row: pointer to the logits, their stride, False for a row that is ignored, and the number of logits.
    """
    logits, stride, counts, vocabulary = row
    place = tl.arange(0, PARTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocabulary // (PARTS * LANES) * (PARTS * LANES)
    rest = whole + place
    lanes = (
        tl.full((LANES,), float("-inf"), tl.float32),
        tl.zeros((LANES,), tl.float32),
        tl.zeros((LANES,), tl.float32),
    )
    for begin in range(0, tl.where(counts, whole, 0), PARTS * LANES):
        value = tl.load(logits + begin + place).to(tl.float32)
        lanes = _join(lanes, value, True, PRECISE, SMOOTH, False)
    last = tl.load(logits + rest, mask=(rest < stride) & counts, other=0.0).to(tl.float32)
    largest, total, plain = _join(lanes, last, rest < vocabulary, PRECISE, SMOOTH, True)
    maximum = tl.max(largest, 0)
    return maximum, tl.sum(total * tl.exp(largest - maximum), 0), tl.sum(plain, 0)


@triton.jit
def put_gradient(
    row, label, factors, SLICED: tl.constexpr, PRECISE: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr
):
    """Overwrites a row of logits, see `sums_of_row`, by their gradient, or zeros if the row is ignored.

    Args:
        label: column of the target, negative, with SLICED, if another slice has it; and its logit.
        factors: shift, scale, share and at_target: the gradient is exp(logit - shift) scale - share, and less by
            at_target at the target.
    """
    logits, stride, counts, vocabulary = row
    target, wanted = label
    shift, scale, share, at_target = factors
    place = tl.arange(0, PARTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocabulary // (PARTS * LANES) * (PARTS * LANES)
    rest = whole + place
    for begin in range(0, tl.where(counts, whole, 0), PARTS * LANES):
        value = tl.load(logits + begin + place).to(tl.float32)
        gradient = _exponential(value, shift, PRECISE) * scale - share
        tl.store(logits + begin + place, gradient.to(logits.dtype.element_ty))
    value = tl.load(logits + rest, mask=(rest < stride) & counts, other=0.0).to(tl.float32)
    gradient = _exponential(value, shift, PRECISE) * scale - share
    gradient = tl.where((rest < vocabulary) & counts, gradient, 0.0)
    tl.store(logits + rest, gradient.to(logits.dtype.element_ty), mask=rest < stride)
    if counts:
        own = _exponential(wanted, shift, PRECISE) * scale - share - at_target
        tl.debug_barrier()  # another thread has stored to the same address
        if SLICED:
            tl.store(logits + target, own.to(logits.dtype.element_ty), mask=target >= 0)
        else:
            tl.store(logits + target, own.to(logits.dtype.element_ty))
    else:
        for begin in range(0, whole, PARTS * LANES):
            tl.store(logits + begin + place, tl.zeros((PARTS, LANES), logits.dtype.element_ty))


@triton.jit(do_not_specialize=["ignore_index"])
def loss_rows(
    logits, stride, targets, losses, factors, vocabulary, smoothing, ignore_index, GRADIENT: tl.constexpr,
    SMOOTH: tl.constexpr, PRECISE: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Computes a row's loss from its logits, and overwrites them with their gradient.

    With PARTS 0 a row, of LANES values at most, is held in registers; otherwise it is read twice, PARTS LANES values at
    once.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counts = target != ignore_index
    target = tl.where(counts, target, 0)
    wanted = tl.load(logits + target).to(tl.float32)
    factor = tl.where(counts, 1.0, 0.0)
    if factors is not None:
        factor *= tl.load(factors + row).to(tl.float32)
    if PARTS == 0:
        column = tl.arange(0, LANES)
        inside = column < vocabulary
        value = tl.load(logits + column, mask=(column < stride) & counts, other=0.0).to(tl.float32)
        plain = tl.sum(tl.where(inside, value, 0.0), 0) if SMOOTH else 0.0
        value = tl.where(inside, value, float("-inf"))
        maximum = tl.max(value, 0)
        power = _exponential(value, tl.where(maximum == float("-inf"), 0.0, maximum), PRECISE)
        normalizer = tl.sum(power, 0)
        if GRADIENT:
            gradient = power * (factor / normalizer) - factor * smoothing / vocabulary
            gradient -= tl.where(column == target, (1.0 - smoothing) * factor, 0.0)
            gradient = tl.where(inside & counts, gradient, 0.0)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < stride)
    else:
        whole_row = logits, stride, counts, vocabulary
        maximum, normalizer, plain = sums_of_row(whole_row, SMOOTH, PRECISE, PARTS, LANES)
    log_normalizer = tl.log(normalizer)
    loss = maximum - wanted + log_normalizer
    if SMOOTH:
        mean = maximum - plain / vocabulary + log_normalizer
        loss = (1.0 - smoothing) * loss + smoothing * mean
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT and PARTS > 0:
        share, at_target = factor * smoothing / vocabulary, (1.0 - smoothing) * factor
        factors = maximum, factor / normalizer, share, at_target
        put_gradient(whole_row, (target, wanted), factors, False, PRECISE, PARTS, LANES)


@triton.jit
def loss_scaling(values, factor, count, TILE: tl.constexpr):
    """Multiplies values by a scalar, in float32; leaves them as they are if it is 1."""
    by = tl.load(factor).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (place < count) & (by != 1.0)
    value = tl.load(values + place, mask=inside, other=0.0).to(tl.float32) * by
    tl.store(values + place, value.to(values.dtype.element_ty), mask=inside)


def scale(values: Tensor, factor: Tensor) -> None:
    """Multiplies contiguous values in place by a scalar on the device; reads and writes nothing if it is 1."""
    if values.numel():
        loss_scaling[(triton.cdiv(values.numel(), _VALUES),)](values, factor, values.numel(), TILE=_VALUES)


def row_constants(logits: Tensor, vocabulary: int, warps: int = _WARPS) -> dict[str, Any]:
    """Returns the compile-time arguments with which a program handles a row of logits, part by part."""
    lanes = min(16 // logits.element_size() * 32 * warps, triton.next_power_of_2(vocabulary))
    parts = max(1, min(_VALUES // lanes, triton.next_power_of_2(triton.cdiv(vocabulary, lanes))))
    return {"PRECISE": logits.dtype == torch.float32, "PARTS": parts, "LANES": lanes, "num_warps": warps}


def make_losses(
    logits: Tensor,
    vocabulary: int,
    targets: Tensor,
    losses: Tensor,
    factors: Tensor | None,
    smoothing: float,
    ignore_index: int,
    gradient: bool,
) -> None:
    """Computes the losses (C,) of logits (C, W), W >= V; with ``gradient`` overwrites logits with their gradient."""
    constants = row_constants(logits, vocabulary)
    lanes = triton.next_power_of_2(logits.stride(0))
    if lanes <= _WHOLE:
        constants |= {"PARTS": 0, "LANES": lanes, "num_warps": _WARPS * max(1, lanes // _VALUES)}
    loss_rows[(len(logits),)](
        logits, logits.stride(0), targets, losses, factors, vocabulary, smoothing, ignore_index, GRADIENT=gradient,
        SMOOTH=smoothing != 0.0, **constants,
    )  # fmt: skip


def add_rows(bias: Tensor, gradient: Tensor, fresh: bool) -> None:
    """Adds the sum of gradient (C, W) over its rows to bias (V,), or overwrites bias if ``fresh``."""
    assert gradient.is_contiguous()
    width = gradient.shape[1]
    counters = counters_of_sums(width)
    workspace = torch.zeros(counters + PARTIALS * width, dtype=torch.int32, device=bias.device)
    sums = bias.new_empty(width)
    column_sums(gradient, sums, workspace, 0, counters)
    sums = sums[: len(bias)]
    bias.copy_(sums) if fresh else bias.add_(sums)
