"""Output layer and loss with the weight split over ranks: each has some rows, a slice of the vocabulary.

For each chunk of rows, ranks exchange three numbers per row. During the exchange the logits of the next chunk are
computed in a second buffer.

Sizes: N rows, C rows of a chunk, H hidden size, V vocabulary, v of it on this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends.triton.sliced_cross_entropy import Labels, put_slice_gradient, slice_numbers_of
from econmt_ops.core.gathering import Gather, Gathered
from econmt_ops.linear_cross_entropy.row_chunks import ChunkProducts, Gradients

CHUNK_BYTES = 64 << 20
"""Bytes of each of the two buffers for the logits of a chunk, in the compute type."""


def losses_of_slice(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    gather: Gather,
    scale: Tensor,
    gradients: Gradients,
) -> Tensor:
    """Returns the losses (N,) in float32; writes this rank's share of the gradients of ``scale`` times their sum.

    Args:
        hidden: (N, H), N > 0; weight: (v, H); bias: (v,) or None; see `ChunkProducts`.
        labels: targets of the rows. gather: exchanges numbers between ranks, which all call it equally often.
        scale: a scalar on the device.
        gradients: gradients of hidden (N, H), to be summed over ranks, and of weight (v, H) and bias (v,); all are
            overwritten.
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
