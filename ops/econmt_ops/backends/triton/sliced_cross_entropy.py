"""Losses of logits that are slices of the vocabulary, on one rank or on several.

For a chunk of logits, a first kernel computes three numbers per row of each slice, and a second one, from the numbers
of all slices, the losses and the gradient of the logits in place.

Sizes: N rows, C rows of a chunk, V vocabulary, v words of a slice, W >= v columns of a buffer, R slices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.triton.cross_entropy import put_gradient, row_constants, sums_of_row


class Labels(NamedTuple):
    """Targets of the rows, and the position of this rank's slice in the vocabulary.

    Attributes:
        targets: (N,) int64; rows with ``ignore_index`` have loss and gradients 0.
        first: token of this slice's first row. vocabulary: V. widest: number of rows of the largest slice of any rank.
        smoothing, ignore_index: as in `econmt_ops.linear_cross_entropy`.
    """

    targets: Tensor
    first: int
    vocabulary: int
    widest: int
    smoothing: float
    ignore_index: int


@triton.jit(do_not_specialize=["ignore_index", "first"])
def slice_numbers(
    logits, stride, targets, numbers, rows, first, own, ignore_index, SMOOTH: tl.constexpr,
    PRECISE: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Writes numbers (3, C), one program per row: log-sum-exp, logit of the target, sum of the logits of the slice.

    The target's logit is 0 if another rank has it; all three are 0 for ignored rows.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counts = target != ignore_index
    place = target - first
    here = counts & (place >= 0) & (place < own)
    wanted = tl.load(logits + place, mask=here, other=0.0).to(tl.float32)
    maximum, normalizer, plain = sums_of_row((logits, stride, counts, own), SMOOTH, PRECISE, PARTS, LANES)
    tl.store(numbers + row, tl.where(counts, maximum + tl.log(normalizer), 0.0))
    tl.store(numbers + rows + row, wanted)
    tl.store(numbers + 2 * rows + row, tl.where(counts, plain, 0.0))


@triton.jit(do_not_specialize=["ignore_index", "first"])
def slice_gradient(
    logits, stride, targets, numbers, ranks, rows, scale, losses, first, own, vocabulary, smoothing,
    ignore_index, RANKS: tl.constexpr, BY_ROW: tl.constexpr, PRECISE: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Computes a row's loss (C,) from the numbers (R, 3, C) of all ranks, and the gradient of ``scale`` times the loss.

    BY_ROW: ``scale`` is (C,).
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counts = target != ignore_index
    place = target - first
    here = counts & (place >= 0) & (place < own)
    rank = tl.arange(0, RANKS)
    told = numbers + rank * 3 * rows + row
    there = rank < ranks
    of_slices = tl.load(told, mask=there, other=float("-inf"))
    wanted = tl.sum(tl.load(told + rows, mask=there, other=0.0), 0)
    plain = tl.sum(tl.load(told + 2 * rows, mask=there, other=0.0), 0)
    largest = tl.max(of_slices, 0)
    normalizer = largest + tl.log(tl.sum(tl.exp(of_slices - largest), 0))
    loss = normalizer - (1.0 - smoothing) * wanted - smoothing / vocabulary * plain
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    factor = tl.where(counts, tl.load(scale + row if BY_ROW else scale).to(tl.float32), 0.0)
    share, at_target = factor * smoothing / vocabulary, (1.0 - smoothing) * factor
    label, factors = (tl.where(here, place, -1), wanted), (normalizer, factor, share, at_target)
    put_gradient((logits, stride, counts, own), label, factors, True, PRECISE, PARTS, LANES)


def slice_numbers_of(logits: Tensor, own: int, targets: Tensor, labels: Labels) -> Tensor:
    """Returns the numbers (3, C) of a slice of ``own`` words, from its logits (C, W); see `slice_numbers`."""
    rows = len(logits)
    numbers = logits.new_empty(3, rows, dtype=torch.float32)
    slice_numbers[(rows,)](
        logits,
        logits.stride(0),
        targets,
        numbers,
        rows,
        labels.first,
        own,
        labels.ignore_index,
        SMOOTH=labels.smoothing != 0.0,
        **row_constants(logits, own, warps=4),  # 8,192 x 6,144 logits take 39 us, with 8 warps 52
    )
    return numbers


def put_slice_gradient(
    logits: Tensor, own: int, targets: Tensor, numbers: Tensor, labels: Labels, scale: Tensor, losses: Tensor
) -> None:
    """Writes the losses (C,) of rows, and overwrites their logits (C, W) of a slice of ``own`` words by the gradient.

    Args:
        numbers: (R, 3, C), from `slice_numbers` of each slice, or of slices together.
        scale: factor of the gradient: a scalar, or (C,).
    """
    slice_gradient[(len(losses),)](
        logits, logits.stride(0), targets, numbers, len(numbers), len(losses), scale, losses, labels.first, own,
        labels.vocabulary, labels.smoothing, labels.ignore_index, RANKS=triton.next_power_of_2(len(numbers)),
        BY_ROW=scale.dim() == 1, **row_constants(logits, own),
    )  # fmt: skip
