"""Output layer and loss in chunks of rows: cuBLAS computes the products, one kernel everything between them.

The logits of a chunk are in one buffer, most of which fits the L2 cache: the product writes them, the kernel computes
the losses and overwrites them with their gradient, and the two products of the backward pass read that. No step
synchronises with the GPU. The equations are those of `econmt_ops.backends.losses`.

Sizes: N rows, C rows of a chunk, H hidden size, V vocabulary, W >= V columns of the buffer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.core.alignment import even
from econmt_ops.core.outer import add_outer
from econmt_ops.linear_cross_entropy.recompute import CrossEntropyArguments

CHUNK_BYTES = 64 << 20
"""Bytes of the buffer for the logits of one chunk, in the compute type. On an H200, for 6,400 x 512 x 32,000 in
bfloat16, half of it takes 20 % longer, because the sum of weight gradients is read and written once per chunk, and
twice of it 13 % less. In float32, whose products take longer, half of it costs 5 % and is used."""

_ROUND_ROWS = 64
"""Rows of a chunk are a multiple of this if there are as many: the tile size of a product."""

_ROUND_BYTES = 128
"""Rows of the buffer begin at multiples of this, as fast products require, whatever the vocabulary."""

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
    logits,
    stride,
    targets,
    losses,
    factors,
    vocabulary,
    smoothing,
    ignore_index,
    GRADIENT: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    SMOOTH: tl.constexpr,
    PRECISE: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
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
    if HAS_FACTORS:
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
def loss_bias(gradient, stride, sums, rows, part_rows, vocabulary, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums a tile of columns of gradient (R, V) over a part of its rows, always in the same order."""
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    end = tl.minimum((part + 1) * part_rows, rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(part * part_rows, end, ROWS):
        place = (begin + row)[:, None].to(tl.int64) * stride + column[None, :]
        within = ((begin + row) < end)[:, None] & (column < stride)[None, :]
        total += tl.load(gradient + place, mask=within, other=0.0).to(tl.float32)
    tl.store(sums + part * vocabulary + column, tl.sum(total, 0), mask=column < vocabulary)


_BIAS_PARTS = 16
"""Parts into which the rows of a chunk are divided for the gradient of the bias."""


def row_constants(logits: Tensor, vocabulary: int) -> dict[str, Any]:
    """Returns the compile-time arguments with which a program handles a row of logits, part by part."""
    lanes = min(16 // logits.element_size() * 32 * _WARPS, triton.next_power_of_2(vocabulary))
    parts = max(1, min(_VALUES // lanes, triton.next_power_of_2(triton.cdiv(vocabulary, lanes))))
    return {
        "PRECISE": logits.dtype == torch.float32,
        "PARTS": parts,
        "LANES": lanes,
        "num_warps": _WARPS,
    }


def _constants(logits: Tensor, vocabulary: int) -> dict[str, Any]:
    """Returns the compile-time arguments of `loss_rows`."""
    constants = row_constants(logits, vocabulary)
    lanes = triton.next_power_of_2(logits.stride(0))
    if lanes <= _WHOLE:
        constants |= {"PARTS": 0, "LANES": lanes, "num_warps": _WARPS * max(1, lanes // _VALUES)}
    return constants


def _make_losses(
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
    loss_rows[(len(logits),)](
        logits,
        logits.stride(0),
        targets,
        losses,
        losses if factors is None else factors,
        vocabulary,
        smoothing,
        ignore_index,
        GRADIENT=gradient,
        HAS_FACTORS=factors is not None,
        SMOOTH=smoothing != 0.0,
        **_constants(logits, vocabulary),
    )


def _add_rows(bias: Tensor, gradient: Tensor, fresh: bool) -> None:
    """Adds the sum of gradient (C, W) over its rows to bias (V,), or overwrites bias if ``fresh``."""
    columns, tile = 128, 32
    # Enough programs for a large GPU; few partial sums.
    parts = max(1, min(_BIAS_PARTS, len(gradient) // (4 * tile)))
    part_rows = triton.cdiv(len(gradient), parts)
    sums = bias.new_empty(parts, len(bias))
    loss_bias[(triton.cdiv(len(bias), columns), parts)](
        gradient,
        gradient.stride(0),
        sums,
        len(gradient),
        part_rows,
        len(bias),
        ROWS=tile,
        COLUMNS=columns,
    )
    bias.copy_(sums.sum(0)) if fresh else bias.add_(sums.sum(0))


def _cast(values: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Returns ``values`` (N, M) in another type, zero-padded to ``rows`` and ``columns``; no copy if not needed."""
    if values.dtype == dtype and values.shape == (rows, columns):
        return values.contiguous()
    padded = values.new_empty(rows, columns, dtype=dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    padded[values.shape[0] :] = 0.0
    padded[: values.shape[0], values.shape[1] :] = 0.0
    return padded


def _chunk_rows(rows: int, row_bytes: int, most_bytes: int) -> int:
    """Returns the rows of a chunk: as few chunks as the buffer allows, of about equal size."""
    most = max(1, most_bytes // row_bytes)
    most = max(most // _ROUND_ROWS * _ROUND_ROWS, min(most, _ROUND_ROWS))
    even = triton.cdiv(rows, triton.cdiv(rows, most))
    return min(most, triton.cdiv(even, _ROUND_ROWS) * _ROUND_ROWS)


Gradients = tuple[Tensor, Tensor, Tensor | None]
"""Gradients of hidden (N, H) in the compute type, and in float32 of weight (V, H) and, if there is one, bias (V,)."""


class Products:
    """Products of an output layer, chunk by chunk.

    A weight with unaligned sizes, or of another type, is copied and padded, because products with an odd number of
    columns or with rows at unaligned addresses are slow.

    Args:
        hidden: (N, H) in the compute type: float32, bfloat16 or float16. N > 0.
        weight: (V, H). bias: (V,) or None. Both are cast to the compute type.
        most_bytes: maximum bytes of a chunk's logits.
        widest: largest number of rows of any rank's weight, so that all ranks use the same chunks; None: a single rank.

    Attributes:
        chunks: slices of the N rows.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        most_bytes: int,
        widest: int | None = None,
    ) -> None:
        rows, self._inner = hidden.shape
        unit = _ROUND_BYTES // hidden.element_size()
        self._stride = triton.cdiv(widest or len(weight), unit) * unit
        widths = even(len(weight), hidden.dtype), even(self._inner, hidden.dtype)
        copied = weight.dtype != hidden.dtype or weight.shape != widths
        self._columns = self._stride if copied else len(weight)
        units = even(self._inner, hidden.dtype) if copied else self._inner
        self._weight = _cast(weight, hidden.dtype, self._columns, units)
        self._hidden = _cast(hidden, hidden.dtype, rows, units)
        self._bias = None
        if bias is not None:
            self._bias = _cast(bias.unsqueeze(1), hidden.dtype, self._columns, 1).squeeze(1)
        self._size = _chunk_rows(rows, self._stride * hidden.element_size(), most_bytes)
        self.chunks = [slice(begin, begin + self._size) for begin in range(0, rows, self._size)]

    def buffer(self) -> Tensor:
        """Allocates memory for a chunk's logits (C, W), W >= V."""
        return self._hidden.new_empty(min(self._size, len(self._hidden)), self._stride)

    def logits(self, part: slice, buffer: Tensor) -> Tensor:
        """Computes the logits of a chunk (C, W) in a buffer."""
        chunk = self._hidden[part]
        padded = buffer[: len(chunk)]
        logits = padded[:, : self._columns]
        if self._bias is None:
            torch.mm(chunk, self._weight.t(), out=logits)
        else:
            torch.addmm(self._bias, chunk, self._weight.t(), out=logits)
        return padded

    def add(self, part: slice, padded: Tensor, gradients: Gradients) -> None:
        """Adds the gradients that follow from the gradient of a chunk's logits (C, W); the first chunk overwrites."""
        dhidden, dweight, dbias = gradients
        gradient = padded[:, : self._columns]
        if self._weight.shape[1] == self._inner:
            torch.mm(gradient, self._weight, out=dhidden[part])
        else:
            dhidden[part] = torch.mm(gradient, self._weight)[:, : self._inner]
        add_outer(dweight, gradient.unsqueeze(0), self._hidden[part].unsqueeze(0), part.start == 0)
        if dbias is not None:
            _add_rows(dbias, padded, part.start == 0)


def walk(call: CrossEntropyArguments, factors: Tensor | None, gradients: Gradients | None) -> Tensor:
    """Returns the losses (N,) in float32, and writes the gradients of their sum.

    Args:
        call: arguments; `Products` says which types they may have.
        factors: (N,), factor of each row's gradients; or None.
        gradients: all are overwritten. None: no gradients are computed.
    """
    hidden, weight = call.hidden, call.weight
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    if not len(hidden):
        for gradient in gradients or ():
            if gradient is not None:
                gradient.zero_()
        return losses
    targets = call.targets.contiguous()
    products = Products(hidden, weight, call.bias, CHUNK_BYTES // (2 if hidden.dtype == torch.float32 else 1))
    buffer = products.buffer()
    for part in products.chunks:
        logits = products.logits(part, buffer)
        _make_losses(
            logits,
            len(weight),
            targets[part],
            losses[part],
            None if factors is None else factors[part],
            call.smoothing,
            call.ignore_index,
            gradients is not None,
        )
        if gradients is not None:
            products.add(part, logits, gradients)
    return losses
