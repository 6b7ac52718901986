"""Output layer and cross entropy divided by vocabulary: each rank multiplies with its rows of the matrix.

Let rank r hold the logits l_j of the tokens j in its slice. It computes lse_r = log sum_j exp(l_j) over its slice. The
ranks exchange these numbers, the targets' logits and the sums of logits; with lse = log sum_r exp(lse_r), each rank
knows its share of the gradient, p_j = softmax_r(l)_j exp(lse_r - lse). This is the vocabulary-parallel loss of Shoeybi
et al. (2019), "Megatron-LM", section 3, computed in chunks of rows like `econmt_ops.linear_cross_entropy`. It
communicates the N x D hidden vectors to every rank and as many values of their gradient; dividing rows instead would
communicate V x D values of the matrix's gradient, and every rank would update the whole matrix. On a GPU, Triton
kernels do the work between the products.

Shapes: N rows, D input size of the output layer, V vocabulary, v tokens of it on this rank, C rows of a chunk, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import triton
from econmt_ops.core.gathering import Gather, Gathered
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.products.outer import add_outer

CHUNK_BYTES = 32 << 20
"""Bytes of the logits of one chunk without Triton kernels; two chunks exist at a time."""


class Slice(NamedTuple):
    """This rank's slice of the output layer.

    Attributes:
        weight, bias: Rows of the matrix, (v, D), and their bias, (v,).
        first, vocabulary: Token of the first row, and V.
        most: Rows of the largest slice of any rank, from which all ranks derive the number of rows of a chunk.
    """

    weight: Tensor
    bias: Tensor
    first: int
    vocabulary: int
    most: int


class VocabularyShares(NamedTuple):
    """Loss of all rows, the same on all ranks, and this rank's part of the gradients of ``loss x scale``.

    Attributes:
        loss: Loss in nats, summed over the rows that are not ignored.
        hidden: Gradient of the hidden vectors, (N, D), to be summed over all ranks.
        weight, bias: Gradients of the weight, (v, D), and of the bias, (v,).
    """

    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor


class _VocabularyChunk(NamedTuple):
    """Chunk of rows whose statistics are being exchanged between ranks.

    Attributes:
        rows, hidden: Indices of the rows among N, and hidden vectors, (C, D).
        has_target, local_targets: (C,), True if this rank has the target, and the target's index in its slice, or 0.
        softmax, lse: (C, v) and (C,), softmax and log-sum-exp over the slice, in the accumulate type.
        counts: (C,), 1 for rows with a loss, 0 for ignored rows.
        statistics: (R, 3, C), for each rank lse, the target's logit (0 on other ranks) and the sum of logits.
    """

    rows: Tensor | slice
    hidden: Tensor
    has_target: Tensor
    local_targets: Tensor
    softmax: Tensor
    lse: Tensor
    counts: Tensor
    statistics: Gathered


@torch.no_grad()
def split_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    layer: Slice,
    gather: Gather,
    *,
    scale: Tensor,
    label_smoothing: float,
    ignore_index: int,
) -> VocabularyShares:
    """Computes the cross entropy of the softmax over all slices, and its gradients.

    While the statistics of a chunk are exchanged, the logits of the next one are computed.

    Args:
        hidden: (N, D), the same on all ranks, in the type of the products.
        targets: (N,) int64, the same on all ranks.
        gather: Gathers a tensor from all ranks, which call it equally often.
        scale: Factor of the gradients, a scalar on the device.
        label_smoothing: Probability mass spread evenly over all V tokens.
        ignore_index: Target of rows without loss and gradient.
    """
    if len(hidden) and triton.serves(hidden):
        # Both import triton.
        from econmt_ops.backends.triton.sliced_cross_entropy import Labels
        from econmt_ops.linear_cross_entropy.row_chunks import losses_of_slice

        labels = Labels(targets, layer.first, layer.vocabulary, layer.most, label_smoothing, ignore_index)
        weight, bias = (
            torch.empty_like(chunk_rows, dtype=torch.float32) for chunk_rows in (layer.weight, layer.bias)
        )
        gradients = torch.empty_like(hidden), weight, bias
        losses = losses_of_slice(hidden, layer.weight, layer.bias, labels, gather, scale, gradients)
        return VocabularyShares(losses.sum(), *gradients)
    exact = accumulate_dtype(hidden.dtype)
    shares = VocabularyShares(
        torch.zeros((), dtype=exact, device=hidden.device),
        torch.zeros_like(hidden),
        torch.zeros_like(layer.weight, dtype=exact),
        torch.zeros_like(layer.bias, dtype=exact),
    )
    weight, bias = layer.weight.to(hidden.dtype), layer.bias.to(hidden.dtype)
    size = max(1, CHUNK_BYTES // (layer.most * exact.itemsize))
    rows: Tensor | None = None
    count = len(targets)
    if hidden.device.type == "cpu":  # drops ignored rows; a GPU would have to be synchronized for that
        rows = (targets != ignore_index).nonzero().squeeze(1)
        count = len(rows)
    previous: _VocabularyChunk | None = None
    for begin in range(0, count, size):
        chunk_rows = slice(begin, begin + size) if rows is None else rows[begin : begin + size]
        started = _begin(
            chunk_rows, hidden[chunk_rows], targets[chunk_rows], layer, (weight, bias), gather, ignore_index
        )
        if previous is not None:
            _end(previous, weight, layer.vocabulary, shares, scale, label_smoothing)
        previous = started
    if previous is not None:
        _end(previous, weight, layer.vocabulary, shares, scale, label_smoothing)
    return shares


def _begin(
    rows: Tensor | slice,
    hidden: Tensor,
    targets: Tensor,
    layer: Slice,
    cast: tuple[Tensor, Tensor],
    gather: Gather,
    ignore_index: int,
) -> _VocabularyChunk:
    """Computes a chunk up to the statistics that are exchanged; ``cast``: weight and bias in the products' type."""
    exact = accumulate_dtype(hidden.dtype)
    logits = functional.linear(hidden, *cast).to(exact)
    local_targets = targets - layer.first
    counts = targets != ignore_index
    has_target = (local_targets >= 0) & (local_targets < len(layer.weight)) & counts
    local_targets = local_targets.where(has_target, 0)
    target_logits = logits.gather(1, local_targets.unsqueeze(1)).squeeze(1).where(has_target, 0.0)
    total = logits.sum(1)
    # The softmax of the largest logit is exp(max l - lse), which is at least 1 / v.
    top = logits.amax(1)
    softmax = torch.softmax(logits, 1, out=logits)
    lse = top - softmax.amax(1).log()
    statistics = gather(torch.stack([lse, target_logits, total]))
    return _VocabularyChunk(
        rows, hidden, has_target, local_targets, softmax, lse, counts.to(exact), statistics
    )


def _end(
    chunk: _VocabularyChunk,
    weight: Tensor,
    vocabulary: int,
    shares: VocabularyShares,
    scale: Tensor,
    smoothing: float,
) -> None:
    """Adds a chunk's loss and gradients to the sums."""
    slice_lse, target_logits, totals = chunk.statistics.wait().unbind(1)
    lse = slice_lse.logsumexp(0)
    losses = lse - (1.0 - smoothing) * target_logits.sum(0) - smoothing / vocabulary * totals.sum(0)
    shares.loss.add_((losses * chunk.counts).sum())
    factors = chunk.counts * scale
    logit_gradients = chunk.softmax
    logit_gradients.mul_(((chunk.lse - lse).exp() * factors).unsqueeze(1))
    if smoothing:
        logit_gradients.sub_((factors * (smoothing / vocabulary)).unsqueeze(1))
    at_target = chunk.has_target * factors * (smoothing - 1.0)
    logit_gradients.scatter_add_(1, chunk.local_targets.unsqueeze(1), at_target.unsqueeze(1))
    gradient = logit_gradients.to(chunk.hidden.dtype)
    shares.hidden[chunk.rows] = gradient @ weight
    add_outer(shares.weight, gradient.unsqueeze(0), chunk.hidden.unsqueeze(0))
    shares.bias.add_(logit_gradients.sum(0))
