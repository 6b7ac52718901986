"""The output layer and its loss over a large vocabulary, slice by slice of its words.

Chunks of rows read and write the sum of the weight's gradient once a chunk. With a hundred thousand words that takes as
long as the products, and the sum, in float32, is the largest tensor of all. Here a slice of words is worked on with all
rows: the gradient of its part of the weight is one product, written once in the weight's own type. The price is a
second making of the logits, since a row's normalizer is known only when all slices have been seen: 8 N V H operations
instead of 6.

Logits lie where the gradient of the weight will be, as long as it is not there yet: those of the first slices stay
there between the two walks and are not made again. The last slices have a buffer. The gradient of hidden is summed in
float32, half of it in the place of the result.

Shapes: N rows, H hidden size, V vocabulary, v words of a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends.triton.cross_entropy import Gradients, _add_rows, _cast, row_constants
from econmt_ops.backends.triton.sliced_cross_entropy import Labels, _numbers, slice_gradient
from econmt_ops.core.alignment import even
from econmt_ops.core.chunks import add_outer

SLICE_BYTES = 96 << 20
"""The logits of a slice: what the second-level cache holds."""

_BUFFER_BYTES = 28 << 20
"""Those of the last slices, for which there is no other room."""

_ROUND_WORDS = 256
"""Words of a slice are a multiple of this: what the tiles of a product hold."""


class _Slices:
    """Which words each slice has, and where its logits lie.

    Attributes:
        parts: of the vocabulary.
    """

    def __init__(self, hidden: Tensor, vocabulary: int, dweight: Tensor | None) -> None:
        """``dweight``: (V, H), contiguous, which is written slice by slice from the first on; None: it is not."""
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
        """Values for which there is room where the gradient of later words will be."""
        return self._spare.numel() - word * self._of_word

    def _width(self, number: int) -> int:
        part = self.parts[number]
        return even(part.stop - part.start, self._buffer.dtype)

    def _kept(self, number: int) -> Tensor:
        """The place of a slice whose logits stay: the last one's at the end, none where gradients are before it."""
        begin = self._spare.numel() - (self.kept - number) * self._size
        return self._spare[begin : begin + self._size]

    def first_place(self, number: int) -> Tensor:
        """Room for the logits (N, W) of a slice while no gradient has been written."""
        if number < self.kept:
            place = self._kept(number)
        else:
            place = self._spare if self._spare.numel() >= self._size else self._buffer
        return place[: self._rows * self._width(number)].view(self._rows, -1)

    def second_place(self, number: int) -> Tensor:
        """The same while the gradients of the words before are there."""
        values = self._rows * self._width(number)
        if number < self.kept:
            place = self._kept(number)[:values]
        elif self._behind(self.parts[number].stop) >= values:
            place = self._spare[-values:]
        else:
            place = self._buffer[:values]
        return place.view(self._rows, -1)


class _HiddenSum:
    """The gradient of hidden (N, H), 16 bits wide, as a sum in float32, of which the first half lies in its place."""

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


def walk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    smoothing: float,
    ignore_index: int,
    scale: Tensor,
    gradients: Gradients | None,
) -> Tensor:
    """The losses (N,) in float32, and the gradients of their sum.

    Args:
        hidden: (N, H) in 16 bits, N > 0 and H a multiple of 8. weight: (V, H). bias: (V,) or None.
        targets: (N,) int64; rows with ``ignore_index`` have loss and gradients 0.
        smoothing, ignore_index: as in `econmt_ops.linear_cross_entropy`.
        scale: by which gradients are multiplied: a scalar on the device, or (N,), each row's.
        gradients: of hidden in its type, of weight in its own or float32, contiguous, and of bias in float32; all are
            written, whatever they hold. None: no gradient is wanted.
    """
    hidden, targets = hidden.contiguous(), targets.contiguous()
    slices = _Slices(hidden, len(weight), None if gradients is None else gradients[1])
    labels = [Labels(targets, part.start, len(weight), 0, smoothing, ignore_index) for part in slices.parts]

    def words(part: slice) -> Tensor:
        """A slice of the weight, in the type of hidden and of even height."""
        own = weight[part]
        return _cast(own, hidden.dtype, even(len(own), hidden.dtype), own.shape[1])

    def make(part: slice, logits: Tensor) -> None:
        own = words(part)
        if bias is None:
            torch.mm(hidden, own.t(), out=logits)
        else:
            padded = _cast(bias[part].unsqueeze(1), hidden.dtype, len(own), 1).squeeze(1)
            torch.addmm(padded, hidden, own.t(), out=logits)

    told = []
    for number, part in enumerate(slices.parts):
        logits = slices.first_place(number)
        make(part, logits)
        told.append(_numbers(logits, part.stop - part.start, targets, labels[number]))
    numbers = _joined(told)
    told.clear()
    normalizer, wanted, plain = numbers[0]
    losses = normalizer - (1.0 - smoothing) * wanted - smoothing / len(weight) * plain
    losses.masked_fill_(targets == ignore_index, 0.0)
    if gradients is None:
        return losses
    dhidden, dweight, dbias = gradients
    total = _HiddenSum(dhidden)
    for number, part in enumerate(slices.parts):
        logits = slices.second_place(number)
        if number >= slices.kept:
            make(part, logits)
        _put_gradient(logits, part.stop - part.start, numbers, labels[number], scale, losses)
        total.add(logits, words(part), number == 0)
        if dbias is not None:
            _add_rows(dbias[part], logits, True)
        add_outer(dweight[part], logits.unsqueeze(0), hidden.unsqueeze(0), True)
    del slices, logits  # or what is rounded would be made beside the buffer
    total.finish()
    return losses


def _joined(told: list[Tensor]) -> Tensor:
    """The numbers (1, 3, N) of all words from those of slices, (3, N) each."""
    numbers = torch.stack(told)
    return torch.stack((numbers[:, 0].logsumexp(0), numbers[:, 1].sum(0), numbers[:, 2].sum(0))).unsqueeze(0)


def _put_gradient(
    logits: Tensor, own: int, numbers: Tensor, labels: Labels, scale: Tensor, losses: Tensor
) -> None:
    """The gradient of a slice's logits (N, W) in their place; the losses are written once more."""
    slice_gradient[(len(logits),)](
        logits,
        logits.stride(0),
        labels.targets,
        numbers,
        1,
        len(logits),
        scale,
        losses,
        labels.first,
        own,
        labels.vocabulary,
        labels.smoothing,
        labels.ignore_index,
        RANKS=1,
        BY_ROW=scale.dim() == 1,
        **row_constants(logits, own),
    )
