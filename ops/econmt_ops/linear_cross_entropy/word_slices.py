"""Output layer and loss for a large vocabulary, computed slice by slice of the vocabulary.

Chunks of rows read and write the sum of the weight's gradient once per chunk. With a hundred thousand words that takes
as long as the products, and the float32 sum is the largest tensor. Here a slice of words is processed with all rows:
the gradient of its part of the weight is one product, written once in the weight's own type. The price is computing the
logits twice, because a row's normaliser is known only after all slices: 8 N V H operations instead of 6.

Logits are stored in the memory of the weight's gradient until that is written: those of the first slices stay there
between the two passes and are not recomputed. The last slices use a buffer. The gradient of hidden is summed in
float32, half of it in the memory of the result.

Sizes: N rows, H hidden size, V vocabulary, v words of a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends.triton.cross_entropy import add_rows
from econmt_ops.backends.triton.sliced_cross_entropy import Labels, put_slice_gradient, slice_numbers_of
from econmt_ops.core.alignment import even
from econmt_ops.core.arguments import CrossEntropyArguments, RowGradients
from econmt_ops.linear_cross_entropy.row_chunks import cast
from econmt_ops.products.gemm import multiply
from econmt_ops.products.outer import add_outer

SLICE_BYTES = 96 << 20
"""Bytes of the logits of a slice, chosen to fit the L2 cache."""

_BUFFER_BYTES = 28 << 20
"""Bytes of the logits of the last slices, which need a buffer."""

_ROUND_WORDS = 256
"""Words of a slice are a multiple of this: the tile size of a product."""


class _Slices:
    """Slices of the vocabulary, and the memory for their logits.

    Attributes:
        parts: the slices. kept: number of leading slices whose logits stay between the two passes.
    """

    def __init__(self, hidden: Tensor, vocabulary: int, dweight: Tensor | None) -> None:
        """Plans the slices; ``dweight``: (V, H), contiguous, which is written slice by slice, or None."""
        self._rows, self._inner = hidden.shape
        self._spare = hidden.new_empty(0) if dweight is None else dweight.view(-1).view(hidden.dtype)
        self._of_word = self._spare.numel() // vocabulary
        row_bytes = self._rows * hidden.element_size()
        wide, narrow = (
            max(1, most // row_bytes // _ROUND_WORDS) * _ROUND_WORDS for most in (SLICE_BYTES, _BUFFER_BYTES)
        )
        if dweight is None:
            narrow = wide
        self.parts: list[slice] = []
        begin = full = 0
        while begin < vocabulary:
            end = min(vocabulary, begin + wide)
            if self._behind(end) < self._rows * wide:
                end = min(vocabulary, begin + narrow)
            elif full == len(self.parts):
                full += 1
            self.parts.append(slice(begin, end))
            begin = end
        self._size = self._rows * wide
        places = self._spare.numel() // self._size
        clear = (self._spare.numel() - self._size) // max(1, wide * self._of_word)
        self.kept = max(0, min(full, places - 1, clear))
        self._buffer = hidden.new_empty(self._rows * narrow)

    def _behind(self, word: int) -> int:
        """Returns the number of values that fit into the gradient's memory for the words from ``word`` on."""
        return self._spare.numel() - word * self._of_word

    def _width(self, number: int) -> int:
        part = self.parts[number]
        return even(part.stop - part.start, self._buffer.dtype)

    def _kept(self, number: int) -> Tensor:
        """Returns the memory of a slice whose logits are kept: at the end of the gradient, which is written last."""
        begin = self._spare.numel() - (self.kept - number) * self._size
        return self._spare[begin : begin + self._size]

    def first_place(self, number: int) -> Tensor:
        """Returns memory for the logits (N, W) of a slice while no gradient has been written."""
        if number < self.kept:
            place = self._kept(number)
        else:
            place = self._spare if self._spare.numel() >= self._size else self._buffer
        return place[: self._rows * self._width(number)].view(self._rows, -1)

    def second_place(self, number: int) -> Tensor:
        """Returns memory for the logits (N, W) of a slice when the gradients of earlier words have been written."""
        values = self._rows * self._width(number)
        if number < self.kept:
            place = self._kept(number)[:values]
        elif self._behind(self.parts[number].stop) >= values:
            place = self._spare[-values:]
        else:
            place = self._buffer[:values]
        return place.view(self._rows, -1)


class _HiddenSum:
    """Gradient of hidden (N, H), of 16 bits, summed in float32; half of the sum uses the memory of the result."""

    def __init__(self, dhidden: Tensor) -> None:
        self._result = dhidden
        rows, inner = dhidden.shape
        self._half = rows // 2
        first = dhidden.view(-1)[: 2 * self._half * inner].view(torch.float32).view(self._half, inner)
        second = dhidden.new_empty(rows - self._half, inner, dtype=torch.float32)
        self._parts = (first, second)

    def add(self, gradient: Tensor, weight: Tensor, fresh: bool) -> None:
        """Adds gradient (N, v) times weight (v, H)."""
        for part, rows in zip(self._parts, (slice(0, self._half), slice(self._half, None)), strict=True):
            if len(part):
                add_outer(part, gradient[rows].t().unsqueeze(0), weight.unsqueeze(0), fresh)

    def finish(self) -> None:
        """Writes the result."""
        first, second = self._parts
        rounded = first.to(self._result.dtype)
        self._result[: self._half] = rounded
        self._result[self._half :] = second


def losses_by_slices(
    call: CrossEntropyArguments, factors: Tensor | None, gradients: RowGradients | None
) -> Tensor:
    """Computes `econmt_ops.linear_cross_entropy.recompute._losses`, where that slices the vocabulary.

    The gradients of the weight are in its type or float32, and contiguous.
    """
    weight, bias, smoothing, ignore_index = call.weight, call.bias, call.smoothing, call.ignore_index
    hidden, targets = call.hidden.contiguous(), call.targets.contiguous()
    factors = hidden.new_ones((), dtype=torch.float32) if factors is None else factors
    slices = _Slices(hidden, len(weight), None if gradients is None else gradients[1])
    labels = [Labels(targets, part.start, len(weight), 0, smoothing, ignore_index) for part in slices.parts]

    def words(part: slice) -> Tensor:
        """Returns a slice of the weight, in the type of hidden and with an aligned number of rows."""
        rows = weight[part]
        return cast(rows, hidden.dtype, even(len(rows), hidden.dtype), rows.shape[1])

    def make(part: slice, logits: Tensor) -> None:
        rows = words(part)
        padded = (
            None if bias is None else cast(bias[part].unsqueeze(1), hidden.dtype, len(rows), 1).squeeze(1)
        )
        multiply(hidden, rows, padded, logits)

    told = []
    for number, part in enumerate(slices.parts):
        logits = slices.first_place(number)
        make(part, logits)
        told.append(slice_numbers_of(logits, part.stop - part.start, targets, labels[number]))
    each = torch.stack(told)
    numbers = torch.stack((each[:, 0].logsumexp(0), each[:, 1].sum(0), each[:, 2].sum(0))).unsqueeze(0)
    del each
    told.clear()
    normalizer, wanted, plain = numbers[0]
    losses: Tensor = normalizer - (1.0 - smoothing) * wanted - smoothing / len(weight) * plain
    losses.masked_fill_(targets == ignore_index, 0.0)
    if gradients is None:
        return losses
    dhidden, dweight, dbias = gradients
    total = _HiddenSum(dhidden)
    for number, part in enumerate(slices.parts):
        logits = slices.second_place(number)
        if number >= slices.kept:
            make(part, logits)
        own = part.stop - part.start
        put_slice_gradient(logits, own, targets, numbers, labels[number], factors, losses)
        total.add(logits, words(part), number == 0)
        if dbias is not None:
            add_rows(dbias[part], logits, True)
        add_outer(dweight[part], logits.unsqueeze(0), hidden.unsqueeze(0), True)
    del slices, logits  # free the buffer before the rounded copy is allocated
    total.finish()
    return losses
