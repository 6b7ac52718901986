"""Output layer and loss in chunks of rows: cuBLAS computes the products, one kernel everything between them.

The logits of a chunk are in one buffer, most of which fits the L2 cache: the product writes them, the kernel computes
the losses and overwrites them with their gradient, and the two products of the backward pass read that. No step
synchronises with the GPU.

The weight may be split over ranks, each of which has some rows, a slice of the vocabulary. For each chunk of rows,
ranks exchange three numbers per row. During the exchange the logits of the next chunk are computed in a second buffer.

Sizes: N rows, C rows of a chunk, H hidden size, V vocabulary, v of it on this rank, W >= V columns of the buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends.triton.cross_entropy import add_rows, make_losses
from econmt_ops.backends.triton.sliced_cross_entropy import Labels, put_slice_gradient, slice_numbers_of
from econmt_ops.core.alignment import even
from econmt_ops.core.arguments import CrossEntropyArguments, Gather, Gathered, RowGradients
from econmt_ops.products.gemm import multiply
from econmt_ops.products.outer import add_outer

CHUNK_BYTES = 64 << 20
"""Bytes of the buffer for the logits of one chunk, in the compute type. On an H200, for 6,400 x 512 x 32,000 in
bfloat16, half of it takes 20 % longer, because the sum of weight gradients is read and written once per chunk, and
twice of it 13 % less. In float32, whose products take longer, half of it costs 5 % and is used."""

_ROUND_ROWS = 64
"""Rows of a chunk are a multiple of this if there are as many: the tile size of a product."""

_ROUND_BYTES = 128
"""Rows of the buffer begin at multiples of this, as fast products require, whatever the vocabulary."""


def cast(values: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
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
    equal = -(-rows // -(-rows // most))
    return min(most, -(-equal // _ROUND_ROWS) * _ROUND_ROWS)


class ChunkProducts:
    """Products of an output layer, chunk by chunk.

    A weight with unaligned sizes, or of another type, is copied and padded, because products with an odd number of
    columns or with rows at unaligned addresses are slow.

    Args:
        hidden: (N, H), N > 0, in float32, bfloat16 or float16. weight: (V, H) and bias: (V,) or None are cast to that.
        most_bytes: maximum bytes of a chunk's logits.
        widest: largest number of rows of any rank's weight, so that all ranks use the same chunks; None: a single rank.

    Attributes:
        chunks: slices of the N rows.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, most_bytes: int, widest: int | None = None
    ) -> None:
        rows, self._inner = hidden.shape
        unit = _ROUND_BYTES // hidden.element_size()
        self._stride = -(-(widest or len(weight)) // unit) * unit
        widths = even(len(weight), hidden.dtype), even(self._inner, hidden.dtype)
        copied = weight.dtype != hidden.dtype or weight.shape != widths
        self._columns = self._stride if copied else len(weight)
        units = even(self._inner, hidden.dtype) if copied else self._inner
        self._weight = cast(weight, hidden.dtype, self._columns, units)
        self._hidden = cast(hidden, hidden.dtype, rows, units)
        self._bias = None
        if bias is not None:
            self._bias = cast(bias.unsqueeze(1), hidden.dtype, self._columns, 1).squeeze(1)
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
        multiply(chunk, self._weight, self._bias, logits)
        return padded

    def add(self, part: slice, padded: Tensor, gradients: RowGradients) -> None:
        """Adds the gradients that follow from the gradient of a chunk's logits (C, W); the first chunk overwrites."""
        dhidden, dweight, dbias = gradients
        gradient = padded[:, : self._columns]
        if self._weight.shape[1] == self._inner:
            torch.mm(gradient, self._weight, out=dhidden[part])
        else:
            dhidden[part] = torch.mm(gradient, self._weight)[:, : self._inner]
        add_outer(dweight, gradient.unsqueeze(0), self._hidden[part].unsqueeze(0), part.start == 0)
        if dbias is not None:
            add_rows(dbias, padded, part.start == 0)


def losses_by_chunks(
    call: CrossEntropyArguments, factors: Tensor | None, gradients: RowGradients | None
) -> Tensor:
    """Computes `econmt_ops.linear_cross_entropy.recompute._losses`; `ChunkProducts` says for which types."""
    hidden, weight = call.hidden, call.weight
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    if not len(hidden):
        for gradient in gradients or ():
            if gradient is not None:
                gradient.zero_()
        return losses
    targets = call.targets.contiguous()
    products = ChunkProducts(
        hidden, weight, call.bias, CHUNK_BYTES // (2 if hidden.dtype == torch.float32 else 1)
    )
    buffer = products.buffer()
    for part in products.chunks:
        logits = products.logits(part, buffer)
        make_losses(
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


def losses_of_slice(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    gather: Gather,
    scale: Tensor,
    gradients: RowGradients,
) -> Tensor:
    """Returns the losses (N,) in float32; writes this rank's share of the gradients of ``scale`` times their sum.

    Args:
        hidden: (N, H), N > 0; weight: (v, H); bias: (v,) or None; see `ChunkProducts`.
        labels: targets of the rows. gather: exchanges numbers between ranks, which all call it equally often.
        scale: a scalar on the device.
        gradients: of hidden, to be summed over ranks, of weight and of bias; all are overwritten.
    """
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    targets = labels.targets.contiguous()
    products = ChunkProducts(hidden, weight, bias, CHUNK_BYTES, labels.widest)
    buffers = [products.buffer() for _ in products.chunks[:2]]

    def end(part: slice, logits: Tensor, numbers: Gathered) -> None:
        told = numbers.wait()
        put_slice_gradient(logits, len(weight), targets[part], told, labels, scale, losses[part])
        products.add(part, logits, gradients)

    before: tuple[slice, Tensor, Gathered] | None = None
    for number, part in enumerate(products.chunks):
        logits = products.logits(part, buffers[number % 2])
        began = part, logits, gather(slice_numbers_of(logits, len(weight), targets[part], labels))
        if before is not None:
            end(*before)
        before = began
    assert before is not None
    end(*before)
    return losses
