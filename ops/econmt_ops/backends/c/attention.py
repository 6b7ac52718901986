"""The attention of a call on the CPU by the C library: `protocol.AttentionKernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.attention import EagerAttention
from econmt_ops.cells.attention import additive_forward


class CAttention(EagerAttention):
    """As `EagerAttention`; the library has all but the scores of dot and of normalised attention.

    Given compiled functions for the scores, those are taken.
    """

    @property
    def _has_scores(self) -> bool:
        return self._score is not None and self._norm is None and self._forward is additive_forward

    def _widened(self, tensor: Tensor) -> Tensor:
        """The library widens what it reads."""
        return tensor

    def _weights(self, query: Tensor) -> Tensor:
        if self._score is None or not self._has_scores:
            return super()._weights(query)
        return library.attention_forward(query, self._keys, self._score, self._padding)

    def _combine(self, share: Tensor, weights: Tensor, output: Tensor) -> None:
        library.combine_forward(share, weights, self._projected, output)

    def _weight_gradient(self, da: Tensor, given: Tensor | None) -> Tensor:
        return library.weight_gradient(self._projected, da, given, self._padding)

    def _weights_backward(
        self, query: Tensor, weights: Tensor, dweights: Tensor, dquery: Tensor, dscores: Tensor
    ) -> None:
        """``dscores`` is left as it is: the library adds to the gradients of keys and score at once."""
        if self._score is None or not self._has_scores:
            super()._weights_backward(query, weights, dweights, dquery, dscores)
            return
        dkeys, dscore, _ = self._sums
        assert dscore is not None
        weights = weights.to(torch.float32)
        library.attention_backward(
            query,
            self._keys,
            self._score,
            self._padding,
            weights,
            dweights,
            dkeys,
            dscore,
            dquery,
        )
