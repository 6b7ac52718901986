"""The output layer and its loss divided by vocabulary: each rank multiplies with its rows of the matrix.

Let rank r hold the logits l_j of the tokens j in its slice. It makes lse_r = log sum_j exp(l_j) over its slice, all
ranks exchange these numbers, the targets' logits and the sums of logits, and with lse = log sum_r exp(lse_r) each has
its share of the gradient: p_j = softmax_r(l)_j exp(lse_r - lse). That is the vocabulary-parallel loss of Shoeybi et al.
(2019), "Megatron-LM", section 3, in chunks of rows as `econmt_ops.linear_cross_entropy` works. What it takes is N x D
values of hidden vectors to every rank and as many of their gradient back; to divide rows instead would take V x D of
the gradient of the matrix, and every rank would update the whole of it. On a GPU our kernels do what is between the
products.

Shapes: N rows, D width of the output layer, V vocabulary, v of it on this rank, C rows of a chunk, R ranks.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import triton
from econmt_ops.core.chunks import add_outer
from econmt_ops.core.gathering import Gather, Gathered
from econmt_ops.core.precision import accumulate_dtype

CHUNK_BYTES = 32 << 20
"""The workspace for the logits of one chunk, of which there are two at a time; without kernels."""


class Slice(NamedTuple):
    """This rank's part of the output layer.

    Attributes:
        weight: (v, D). bias: (v,). first: the token of its first row. vocabulary: V.
        most: rows of the largest slice of any rank, from which all know how many rows a chunk has.
    """

    weight: Tensor
    bias: Tensor
    first: int
    vocabulary: int
    most: int


class VocabularyShares(NamedTuple):
    """Results of one rank: the summed loss, known to all, and its part of the gradients of ``loss x scale``.

    Attributes:
        loss: in nats, summed over the rows that count.
        hidden: (N, D), to be added up over all ranks. weight: (v, D). bias: (v,).
    """

    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor


class _VocabularyChunk(NamedTuple):
    """Rows whose numbers are on their way between the ranks.

    Attributes:
        rows: which of the N. hidden: (C, D). own: (C,) whether this rank has the target. places: (C,) where, or 0.
        softmax: (C, v) over the slice. lse: (C,) of the slice. counts: (C,) 1 where the row counts, else 0. They are
            of the accumulate type, and rounded once for the products.
        numbers: (R, 3, C): lse, the target's logit where it is, and the sum of logits.
    """

    rows: Tensor | slice
    hidden: Tensor
    own: Tensor
    places: Tensor
    softmax: Tensor
    lse: Tensor
    counts: Tensor
    numbers: Gathered


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
    """The cross entropy of the softmax over all slices, and its gradients.

    While the numbers of a chunk travel, the logits of the next one are made.

    Args:
        hidden: (N, D), the same on all ranks, in the type of the products.
        targets: (N,) int64, the same on all ranks.
        layer: this rank's slice.
        gather: exchanges numbers between ranks, which all call it equally often.
        scale: what the gradients are multiplied with, a scalar on the device.
        label_smoothing: probability mass spread evenly over all V tokens.
        ignore_index: rows with this target have no loss and give no gradient.
    """
    if len(hidden) and triton.serves(hidden):
        kernels = importlib.import_module("econmt_ops.backends.triton.sliced_cross_entropy")
        labels = kernels.Labels(
            targets, layer.first, layer.vocabulary, layer.most, label_smoothing, ignore_index
        )
        weight, bias = (torch.empty_like(part, dtype=torch.float32) for part in (layer.weight, layer.bias))
        gradients = torch.empty_like(hidden), weight, bias
        losses = kernels.walk_slice(hidden, layer.weight, layer.bias, labels, gather, scale, gradients)
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
    if hidden.device.type == "cpu":  # rows that do not count are left out; a GPU would have to be waited for
        rows = (targets != ignore_index).nonzero().squeeze(1)
        count = len(rows)
    before: _VocabularyChunk | None = None
    for begin in range(0, count, size):
        part = slice(begin, begin + size) if rows is None else rows[begin : begin + size]
        began = _begin(part, hidden[part], targets[part], layer, (weight, bias), gather, ignore_index)
        if before is not None:
            _end(before, weight, layer.vocabulary, shares, scale, label_smoothing)
        before = began
    if before is not None:
        _end(before, weight, layer.vocabulary, shares, scale, label_smoothing)
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
    """A chunk up to the numbers that are exchanged; ``cast``: weight and bias in the type of the products."""
    exact = accumulate_dtype(hidden.dtype)
    logits = functional.linear(hidden, *cast).to(exact)
    places = targets - layer.first
    counts = targets != ignore_index
    own = (places >= 0) & (places < len(layer.weight)) & counts
    places = places.where(own, 0)
    wanted = logits.gather(1, places.unsqueeze(1)).squeeze(1).where(own, 0.0)
    total = logits.sum(1)
    # The softmax of the largest logit is exp(max l - lse), and at least 1 / v.
    top = logits.amax(1)
    softmax = torch.softmax(logits, 1, out=logits)
    lse = top - softmax.amax(1).log()
    numbers = gather(torch.stack([lse, wanted, total]))
    return _VocabularyChunk(rows, hidden, own, places, softmax, lse, counts.to(exact), numbers)


def _end(
    chunk: _VocabularyChunk,
    weight: Tensor,
    vocabulary: int,
    shares: VocabularyShares,
    scale: Tensor,
    smoothing: float,
) -> None:
    """Adds a chunk's loss and gradients to the shares."""
    of_slices, wanted, totals = chunk.numbers.wait().unbind(1)
    lse = of_slices.logsumexp(0)
    losses = lse - (1.0 - smoothing) * wanted.sum(0) - smoothing / vocabulary * totals.sum(0)
    shares.loss.add_((losses * chunk.counts).sum())
    factors = chunk.counts * scale
    whole = chunk.softmax
    whole.mul_(((chunk.lse - lse).exp() * factors).unsqueeze(1))
    if smoothing:
        whole.sub_((factors * (smoothing / vocabulary)).unsqueeze(1))
    at_target = chunk.own * factors * (smoothing - 1.0)
    whole.scatter_add_(1, chunk.places.unsqueeze(1), at_target.unsqueeze(1))
    gradient = whole.to(chunk.hidden.dtype)
    shares.hidden[chunk.rows] = gradient @ weight
    add_outer(shares.weight, gradient.unsqueeze(0), chunk.hidden.unsqueeze(0))
    shares.bias.add_(whole.sum(0))
