"""Attention of a call in the C library, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends.attention import EagerAttention


class CAttention(EagerAttention):
    """`EagerAttention` with C kernels for everything but the scores of dot and of normalised attention."""

    def _widened(self, tensor: Tensor) -> Tensor:
        """Returns the tensor itself: the library widens values as it reads them."""
        return tensor

    def _weights(self, query: Tensor) -> Tensor:
        if self._score is None or self._norm is not None:
            return super()._weights(query)
        return library.attention_forward(query, self._keys, self._score, self._padding)

    def _combine(self, share: Tensor, weights: Tensor, output: Tensor) -> None:
        library.combine_forward(share, weights, self._projected, output)

    def _weight_gradient(self, da: Tensor, other: Tensor | None) -> Tensor:
        if other is None or other.dtype == da.dtype:
            return library.weight_gradient(self._projected, da, other, self._padding)
        # That of coverage is float32 beside 16-bit values.
        found = library.weight_gradient(self._projected, da, None, self._padding) + other
        return found if self._padding is None else found.masked_fill(self._padding, 0.0)

    def _weights_backward(
        self, query: Tensor, weights: Tensor, dweights: Tensor, dquery: Tensor, dscores: Tensor
    ) -> None:
        """Leaves ``dscores`` unwritten: the library adds directly to the gradients of keys and score."""
        if self._score is None or self._norm is not None:
            super()._weights_backward(query, weights, dweights, dquery, dscores)
            return
        dkeys, dscore, _ = self.sums
        assert dscore is not None
        # The library adds de_s (s - s^2) to dkeys; `gradients` multiplies by 4 score once.
        library.call(
            "attention_backward",
            self._keys.numel(),
            **library.sizes("rows positions size", self._keys),
            query=query,
            keys=self._keys,
            score=self._score,
            padding=self._padding,
            weights=weights.to(torch.float32),
            dweights=dweights,
            dkeys=dkeys,
            dscore=dscore,
            dquery=dquery,
        )
