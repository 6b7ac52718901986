"""The scores of attention, a step at a time, with their feature maps made again in the backward pass.

Shapes: B batch, S source positions, A attention size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import c as native
from econmt_ops.backends.steps import EAGER, LAYER_NORM_EPSILON, Steps
from econmt_ops.core.chunks import split_rows
from econmt_ops.core.lengths import padding_mask, zero_padding
from econmt_ops.core.precision import accumulate_dtype


def clean_keys(keys: Tensor, lengths: Tensor | None) -> Tensor:
    """The keys (B, S, A) as additive attention wants them: zero at padded positions, and contiguous.

    Called before the operators, so that both passes share one copy and nobody keeps the keys as they were.
    """
    padding = None if lengths is None else padding_mask(lengths, keys.shape[1], keys.device)
    return zero_padding(keys, padding).contiguous()


class Scores:
    """From a query to the attention weights, and back.

    Additive, score . tanh(norm(query + keys)), or, without ``score``, dot: scale * query . keys.

    Args:
        keys: (B, S, A), zero at padded positions. They are walked in parts of some rows, one workspace each.
        score: (A,) or None.
        norm: (gain (A,), bias (A,)) of the layer normalisation, or None.
        scale: of dot attention.
        padding: (B, S), True at padded positions, or None.
        run: the step functions.
    """

    def __init__(
        self,
        keys: Tensor,
        score: Tensor | None,
        norm: tuple[Tensor, Tensor] | None,
        scale: float,
        padding: Tensor | None,
        run: Steps,
    ) -> None:
        self.accumulate = accumulate_dtype(keys.dtype)
        self.keys, self.norm = keys.contiguous(), norm
        self.score = None if score is None else score.to(self.accumulate)
        self.scale, self.padding, self.run = scale, padding, run
        self.by_native = score is not None and norm is None and run is EAGER and native.serves(keys)
        self.parts = split_rows(keys.shape[0], keys.shape[1], keys.shape[2] * self.accumulate.itemsize)
        if score is not None and norm is None and len(self.parts) == 1 and not self.by_native:
            # What fits a workspace is cast once and not in every step.
            self.keys = self.keys.to(self.accumulate)

    def weights(self, query: Tensor) -> Tensor:
        """The attention weights (B, S) of a query (B, A), in the accumulate type; zero at padded positions."""
        if self.score is not None and self.by_native:
            return native.attention_forward(query, self.keys, self.score, self.padding)
        if self.score is None:
            scores = torch.bmm(self.keys, query.unsqueeze(2)).squeeze(2).to(self.accumulate) * self.scale
        else:
            found = [self._additive(query[rows], self.keys[rows], self.score) for rows in self.parts]
            scores = found[0] if len(found) == 1 else torch.cat(found)
        if self.padding is None:
            return torch.softmax(scores, 1)
        # The lowest finite number rather than -inf: a row without any position would otherwise give NaN.
        scores = scores.masked_fill(self.padding, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, 1).masked_fill_(self.padding, 0.0)

    def _additive(self, query: Tensor, keys: Tensor, score: Tensor) -> Tensor:
        """The scores of some rows, up to a constant."""
        if self.norm is None:
            scores: Tensor = self.run.additive_forward(query, keys, score)
            return scores
        joined = query.unsqueeze(1) + keys
        hidden = functional.layer_norm(joined, joined.shape[2:], *self.norm, eps=LAYER_NORM_EPSILON)
        return torch.matmul(hidden.tanh_(), score.to(hidden.dtype)).to(self.accumulate)


class ScoreGradients:
    """The gradients of keys, score and normalisation, summed over the steps in the accumulate type."""

    def __init__(self, scores: Scores) -> None:
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=scores.accumulate, device=like.device)

        self.scores = scores
        self.keys = zeros(scores.keys)
        self.score = None if scores.score is None else zeros(scores.score)
        self.norm = None if scores.norm is None else (zeros(scores.norm[0]), zeros(scores.norm[1]))

    def step(self, query: Tensor, weights: Tensor, dweights: Tensor) -> Tensor:
        """One step, from the gradient of its weights.

        Args:
            query: (B, A). weights, dweights: (B, S) and their gradient, in the accumulate type.

        Returns:
            The gradient of the query (B, A).
        """
        scores = self.scores
        if scores.by_native:
            assert scores.score is not None
            assert self.score is not None
            dquery = torch.empty_like(query, memory_format=torch.contiguous_format)
            native.attention_backward(
                query,
                scores.keys,
                scores.score,
                scores.padding,
                weights,
                dweights,
                self.keys,
                self.score,
                dquery,
            )
            return dquery
        de = weights * dweights
        de = torch.addcmul(de, weights, de.sum(1, keepdim=True), value=-1)
        if scores.score is None:
            scaled = (de * scores.scale).unsqueeze(1)
            self.keys.baddbmm_(scaled.transpose(1, 2), query.to(scaled.dtype).unsqueeze(1))
            return torch.bmm(scaled.to(query.dtype), scores.keys).squeeze(1)
        backward = self._additive if scores.norm is None else self._normalised
        found = [backward(query[rows], scores.keys[rows], de[rows], self.keys[rows]) for rows in scores.parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _additive(self, query: Tensor, keys: Tensor, de: Tensor, dkeys: Tensor) -> Tensor:
        dquery: Tensor = self.scores.run.additive_backward(
            query, keys, self.scores.score, de, dkeys, self.score
        )
        return dquery

    def _normalised(self, query: Tensor, keys: Tensor, de: Tensor, dkeys: Tensor) -> Tensor:
        scores = self.scores
        assert scores.norm is not None
        assert scores.score is not None
        assert self.score is not None
        assert self.norm is not None
        joined = query.unsqueeze(1) + keys
        size = [joined.shape[2]]
        normed, mean, scale = torch.native_layer_norm(joined, size, *scores.norm, LAYER_NORM_EPSILON)
        hidden, weight = normed.tanh_(), de.to(joined.dtype)
        self.score += torch.mv(hidden.view(-1, size[0]).t(), weight.reshape(-1))
        dnormed = hidden.mul_(hidden).neg_().add_(1).mul_(scores.score).mul_(weight.unsqueeze(2))
        djoined, dgain, dbias = torch.ops.aten.native_layer_norm_backward(
            dnormed, joined, size, mean, scale, *scores.norm, [True, True, True]
        )
        self.norm[0].add_(dgain)
        self.norm[1].add_(dbias)
        dkeys += djoined
        dquery: Tensor = djoined.sum(1)
        return dquery

    def key_gradient(self) -> Tensor:
        """The gradient of the keys (B, S, A) over all steps, in the place of its sum: to be called once."""
        if self.scores.score is not None and self.norm is None:
            self.keys.mul_(self.scores.score * 4)
        return self.keys
