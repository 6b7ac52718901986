"""Attention of a call in PyTorch operators, on any device.

Sizes: B batch, S source positions, A attention size, H width of the projected values, K steps of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends.protocol import AttentionBackward, AttentionGradients, AttentionInputs, CoverageStep
from econmt_ops.cells.attention import LAYER_NORM_EPSILON, additive_backward, additive_forward
from econmt_ops.core.activations import tanh_
from econmt_ops.core.chunks import split_rows
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.loops import steps_of
from econmt_ops.core.precision import accumulate_dtype


def _step_of(block: AttentionBackward, number: int) -> AttentionBackward:
    """Returns the tensors of one step of a block."""
    parts: dict[str, Any] = {
        name: part[number] for name, part in block._asdict().items() if isinstance(part, Tensor)
    }
    return block._replace(doutputs=[part[number] for part in block.doutputs], **parts)


class EagerAttention:
    """Attention of one call, forward and backward, from the query to the output; other backends override its methods.

    Additive attention, score . tanh(norm(query + keys)), or, without ``score``, dot attention, scale * query . keys.

    The feature maps (B, S, A) of additive attention are computed in each step, and again in the backward pass, for a
    part of the batch at a time. The gradients of keys, score and normalisation are therefore summed step by step, while
    the feature map of the step exists; only gradients that are products over all steps are left to the end.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        keys, projected, score, norm, self._scale, lengths, self._squashes = inputs
        self._norm, self._accumulate = norm, accumulate_dtype(keys.dtype)
        self._size = keys.shape[2]
        self._score = None if score is None else score.to(self._accumulate)
        self.replace_keys(keys)
        self._projected = self._widened(projected)
        self._padding = padding_mask(lengths, keys.shape[1], keys.device)
        self._parts = self._parts_of(keys)

    def replace_keys(self, keys: Tensor) -> None:
        """Takes other keys (B, S, A)."""
        self._keys = self._widened(keys) if self._score is not None and self._norm is None else keys

    def _parts_of(self, tensor: Tensor) -> list[slice]:
        batch, positions, width = tensor.shape
        return split_rows(batch, positions, width * self._accumulate.itemsize)

    def _widened(self, tensor: Tensor) -> Tensor:
        """Casts a tensor that fits one workspace once per call; 16-bit products take a CPU five times as long."""
        return tensor.to(self._accumulate) if len(self._parts_of(tensor)) == 1 else tensor

    def forward(
        self, both: Tensor, outputs: Sequence[Tensor], weights: Tensor, coverage: CoverageStep | None = None
    ) -> None:
        """Runs one step: weights = softmax_s score(query, keys_s), output = tanh(share + sum_s weights_s projected_s).

        Without `AttentionInputs.squashes` the output is sum_s weights_s projected_s.

        Args:
            both: (B, A + H), the query and the share of the stack's output (and the bias) in the input of tanh; without
                query weights, A is H and the query is the stack's output.
            outputs: (B, P) tensors that receive the output.
            weights: (B, S) is written, in the compute type; zero at padded positions.
            coverage: the coverage of the step, whose ``after`` is written; None without coverage.
        """
        assert coverage is None
        weights.copy_(self._weights(both[:, : self._size]))
        if self._squashes:
            self._combine(both[:, self._size :], weights, outputs[0])
        else:
            wide = self._projected.dtype
            outputs[0].copy_(torch.bmm(weights.unsqueeze(1).to(wide), self._projected).squeeze(1))
        for other in outputs[1:]:
            other.copy_(outputs[0])

    def weights_of(self, queries: Tensor, coverage: Sequence[Tensor] | None = None) -> Tensor:
        """Returns the weights (K, B, S) of a block's queries (K, B, A), in the compute type, as in `forward`.

        ``coverage``: (B, S, W) before each step; None without coverage.
        """
        assert coverage is None
        weights = queries.new_empty(*queries.shape[:2], self._keys.shape[1])
        for query, step_weights in zip(queries.unbind(0), weights.unbind(0), strict=True):
            step_weights.copy_(self._weights(query))
        return weights

    def backward(self, step: AttentionBackward) -> None:
        """Runs the backward pass of one step or, without coverage, of all steps of a block."""
        assert step.coverage is None
        if step.query.dim() == 3:
            for number in steps_of(range(len(step.query))):
                self.backward(_step_of(step, number))
            return
        dquery = step.dboth[:, : self._size]
        da = step.doutputs[0] if len(step.doutputs) == 1 else step.doutputs[0] + step.doutputs[1]
        if self._squashes:
            da = torch.addcmul(da, da * step.output, step.output, value=-1, out=step.dboth[:, self._size :])
        dweights = self._weight_gradient(da, step.dweights)
        self._weights_backward(step.query, step.weights, dweights, dquery, step.dscores)

    def projected_gradient(self, weights: Tensor, da: Tensor) -> Tensor:
        """Returns the gradient of the projected values (B, S, H): sum_t weights_t da_t; of (T, B, S) and (T, B, P)."""
        wide = self._accumulate
        return torch.bmm(weights.permute(1, 2, 0).to(wide), da.transpose(0, 1).to(wide))

    def gradients(self, queries: Tensor, dscores: Tensor) -> AttentionGradients:
        """Returns the gradients of keys, score and normalisation over all steps; called once, at the end.

        ``queries``: (T, B, A). ``dscores``: (T, B, S), as written by `backward`.
        """
        if self._score is None:
            scaled = dscores.permute(1, 2, 0) * self._scale
            return AttentionGradients(torch.bmm(scaled, queries.transpose(0, 1).to(scaled.dtype)), None, None)
        if self._norm is None:
            self.sums.keys.mul_(self._score * 4)
        return self.sums

    def coverage_gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of the coverage's weights over all steps that have run, in the accumulate type.

        They have the names of the operator's arguments: coverage_key, coverage_shares and, where there are such
        weights, coverage_attention and coverage_recurrent.
        """
        return {}

    @functools.cached_property
    def sums(self) -> AttentionGradients:
        """Gradients of additive attention, summed over the steps so far."""

        def zeros(like: Tensor) -> Tensor:
            return torch.zeros_like(like, dtype=self._accumulate)

        assert self._score is not None
        norm = None if self._norm is None else (zeros(self._norm[0]), zeros(self._norm[1]))
        return AttentionGradients(zeros(self._keys), zeros(self._score), norm)

    def _weights(self, query: Tensor) -> Tensor:
        """Returns the attention weights (B, S) of a query (B, A), in the accumulate type; zero at padded positions."""
        if self._score is None:
            scores = torch.bmm(self._keys, query.unsqueeze(2)).squeeze(2).to(self._accumulate) * self._scale
        else:
            parts = [self._scores(query[rows], self._keys[rows], self._score) for rows in self._parts]
            scores = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._padding is None:
            return torch.softmax(scores, 1)
        # The lowest finite number rather than -inf: a row of length 0 would otherwise give NaN.
        scores = scores.masked_fill(self._padding, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, 1).masked_fill_(self._padding, 0.0)

    def _scores(self, query: Tensor, keys: Tensor, score: Tensor) -> Tensor:
        """Returns the scores of additive attention for a part of the batch, up to a constant."""
        if self._norm is None:
            return additive_forward(query, keys, score)
        joined = query.unsqueeze(1) + keys
        hidden = functional.layer_norm(joined, joined.shape[2:], *self._norm, eps=LAYER_NORM_EPSILON)
        return torch.matmul(hidden.tanh_(), score.to(hidden.dtype)).to(self._accumulate)

    def _combine(self, share: Tensor, weights: Tensor, output: Tensor) -> None:
        """Writes tanh(share + sum_s weights_s projected_s) to ``output``; all (B, H) except the weights (B, S)."""
        wide = self._projected.dtype
        share, weights = share.unsqueeze(1).to(wide), weights.unsqueeze(1).to(wide)
        output.copy_(tanh_(torch.baddbmm(share, weights, self._projected).squeeze(1)))

    def _weight_gradient(self, da: Tensor, other: Tensor | None) -> Tensor:
        """Returns the gradient of the weights (B, S) in the accumulate type, from ``da`` (B, H)."""
        # A product with a row: with a column it takes a CPU five times as long.
        row = da.to(self._projected.dtype).unsqueeze(1)
        dweights = torch.bmm(row, self._projected.transpose(1, 2)).squeeze(1).to(self._accumulate)
        if other is not None:
            dweights += other
        return dweights if self._padding is None else dweights.masked_fill_(self._padding, 0.0)

    def _weights_backward(
        self, query: Tensor, weights: Tensor, dweights: Tensor, dquery: Tensor, dscores: Tensor
    ) -> None:
        """Computes the backward pass of :meth:`_weights`.

        Args:
            query: (B, A). weights: (B, S). dweights: (B, S) in the accumulate type.
            dquery: (B, A) and dscores: (B, S) are written.
        """
        weights = weights.to(self._accumulate)
        de = torch.mul(weights, dweights, out=dscores)
        de.addcmul_(weights, de.sum(1, keepdim=True), value=-1)
        if self._score is None:
            scaled = (de * self._scale).to(self._keys.dtype).unsqueeze(1)
            dquery.copy_(torch.bmm(scaled, self._keys).squeeze(1))
            return
        dkeys, dscore, _ = self.sums
        assert dscore is not None
        for number in steps_of(range(len(self._parts))):
            rows = self._parts[number]
            arguments = (query[rows], self._keys[rows], self._score, de[rows], dkeys[rows], dscore)
            dquery[rows] = (
                additive_backward(*arguments) if self._norm is None else self._normalised_backward(*arguments)
            )

    def _normalised_backward(
        self, query: Tensor, keys: Tensor, score: Tensor, de: Tensor, dkeys: Tensor, dscore: Tensor
    ) -> Tensor:
        """Works like `additive_backward`, with layer normalisation; ``dkeys`` gets the full gradient of the keys."""
        sums = self.sums.norm
        assert self._norm is not None
        assert sums is not None
        joined = query.unsqueeze(1) + keys
        size = [joined.shape[2]]
        normed, mean, scale = torch.native_layer_norm(joined, size, *self._norm, LAYER_NORM_EPSILON)
        hidden, weight = normed.tanh_(), de.to(joined.dtype)
        dscore += torch.mv(hidden.view(-1, size[0]).t(), weight.reshape(-1))
        dnormed = hidden.mul_(hidden).neg_().add_(1).mul_(score).mul_(weight.unsqueeze(2))
        djoined, *dnorm = torch.ops.aten.native_layer_norm_backward(
            dnormed, joined, size, mean, scale, *self._norm, [True, True, True]
        )
        for total, part in zip(sums, dnorm, strict=True):
            total.add_(part)
        dkeys += djoined
        dquery: Tensor = djoined.sum(1)
        return dquery
