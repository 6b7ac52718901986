"""The scores of attention, a step at a time, with their feature maps made again in the backward pass.

Shapes: B batch, S source positions, A attention size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.precision import accumulate_dtype
from econmt_ops.steps import LAYER_NORM_EPSILON, Steps


class Scores:
    """From a query to the attention weights, and back.

    Additive, score . tanh(norm(query + keys)), or, without ``score``, dot: scale * query . keys.

    Args:
        keys: (B, S, A), zero at padded positions.
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
        self.keys, self.score, self.norm = keys.contiguous(), score, norm
        self.scale, self.padding, self.run = scale, padding, run
        self.accumulate = accumulate_dtype(keys.dtype)

    def weights(self, query: Tensor) -> Tensor:
        """The attention weights (B, S) of a query (B, A), in the accumulate type; zero at padded positions."""
        if self.score is None:
            scores = torch.bmm(self.keys, query.unsqueeze(2)).squeeze(2).to(self.accumulate) * self.scale
        elif self.norm is None:
            scores = self.run.additive_forward(query, self.keys, self.score).to(self.accumulate)
        else:
            joined = query.unsqueeze(1) + self.keys
            hidden = functional.layer_norm(joined, joined.shape[2:], *self.norm, eps=LAYER_NORM_EPSILON)
            scores = torch.matmul(hidden.tanh_(), self.score).to(self.accumulate)
        if self.padding is None:
            return torch.softmax(scores, 1)
        # The lowest finite number rather than -inf: a row without any position would otherwise give NaN.
        scores = scores.masked_fill(self.padding, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, 1).masked_fill_(self.padding, 0.0)


class ScoreGradients:
    """The gradients of keys, score and normalisation, summed over the steps in the accumulate type."""

    def __init__(self, scores: Scores) -> None:
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=scores.accumulate, device=like.device)

        self.scores = scores
        self.keys = zeros(scores.keys)
        self.score = None if scores.score is None else zeros(scores.score)
        self.norm = None if scores.norm is None else (zeros(scores.norm[0]), zeros(scores.norm[1]))
        self._per_position = scores.keys.new_zeros(scores.keys.shape[:2], dtype=scores.accumulate)

    def step(self, query: Tensor, weights: Tensor, dweights: Tensor) -> Tensor:
        """One step, from the gradient of its weights.

        Args:
            query: (B, A). weights, dweights: (B, S) and their gradient, in the accumulate type.

        Returns:
            The gradient of the query (B, A).
        """
        scores = self.scores
        de = weights * (dweights - (weights * dweights).sum(1, keepdim=True))
        if scores.score is None:
            scaled = (de * scores.scale).unsqueeze(1)
            self.keys.baddbmm_(scaled.transpose(1, 2), query.to(scaled.dtype).unsqueeze(1))
            return torch.bmm(scaled.to(query.dtype), scores.keys).squeeze(1)
        assert self.score is not None
        if scores.norm is not None:
            return self._normalised(query, de)
        self._per_position += de
        dquery: Tensor = scores.run.additive_backward(
            query, scores.keys, scores.score, de, self.keys, self.score
        )
        return dquery

    def _normalised(self, query: Tensor, de: Tensor) -> Tensor:
        scores = self.scores
        assert scores.norm is not None
        assert scores.score is not None
        assert self.score is not None
        assert self.norm is not None
        joined = query.unsqueeze(1) + scores.keys
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
        self.keys += djoined
        dquery: Tensor = djoined.sum(1)
        return dquery

    def key_gradient(self) -> Tensor:
        """The gradient of the keys (B, S, A) over all steps; zero at padded positions."""
        keys, score = self.keys, self.scores.score
        if score is not None and self.norm is None:
            keys = (self._per_position.unsqueeze(2) - keys).mul_(score)
        return (
            keys if self.scores.padding is None else keys.masked_fill_(self.scores.padding.unsqueeze(2), 0.0)
        )
