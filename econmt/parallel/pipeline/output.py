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
from econmt_ops.core.arguments import Gather
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.products.outer import add_outer

CHUNK_BYTES = 32 << 20
"""Bytes of the logits of one chunk without Triton kernels."""


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
    for begin in range(0, count, size):
        chunk = slice(begin, begin + size) if rows is None else rows[begin : begin + size]
        read, of_chunk = hidden[chunk], targets[chunk]
        logits = functional.linear(read, weight, bias).to(exact)
        counts = (of_chunk != ignore_index).to(exact)
        local = of_chunk - layer.first
        has_target = (local >= 0) & (local < len(layer.weight)) & (of_chunk != ignore_index)
        local = local.where(has_target, 0).unsqueeze(1)
        target_logits = logits.gather(1, local).squeeze(1).where(has_target, 0.0)
        total = logits.sum(1)
        # The softmax of the largest logit is exp(max l - lse), which is at least 1 / v.
        top = logits.amax(1)
        softmax = torch.softmax(logits, 1, out=logits)
        slice_lse = top - softmax.amax(1).log()
        of_ranks = gather(torch.stack([slice_lse, target_logits, total])).wait()
        lse, target_logits, total = of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0), of_ranks[:, 2].sum(0)
        losses = lse - (1.0 - label_smoothing) * target_logits - label_smoothing / layer.vocabulary * total
        shares.loss.add_((losses * counts).sum())
        factors = counts * scale
        logit_gradients = softmax.mul_(((slice_lse - lse).exp() * factors).unsqueeze(1))
        if label_smoothing:
            logit_gradients.sub_((factors * (label_smoothing / layer.vocabulary)).unsqueeze(1))
        at_target = has_target * factors * (label_smoothing - 1.0)
        logit_gradients.scatter_add_(1, local, at_target.unsqueeze(1))
        gradient = logit_gradients.to(hidden.dtype)
        shares.hidden[chunk] = gradient @ weight
        add_outer(shares.weight, gradient.unsqueeze(0), read.unsqueeze(0))
        shares.bias.add_(logit_gradients.sum(0))
    return shares
