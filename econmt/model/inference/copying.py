"""Copying of source words in the steps of a search, see :mod:`econmt.model.copying`.

Shapes: B sentences, S source positions, R rows (hypotheses), V vocabulary, E encoder size, D input width of the output
layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.copying import Copied, Copying, first_positions
from econmt_ops.core.precision import accumulate_dtype


class SourceWords(NamedTuple):
    """Source words of B sentences that may be copied.

    Attributes:
        ids: words as columns of the output layer, (B, S). first: position at which each first occurs, (B, S).
        shares: share of each position's value in the logit of the gate, (B, S).
    """

    ids: Tensor
    first: Tensor
    shares: Tensor

    def keep(self, sentences: Tensor, size: int) -> SourceWords:
        """Selects the first ``size`` positions of the sentences with indices ``sentences`` (C,)."""
        return SourceWords(*(part[:, :size].index_select(0, sentences) for part in self))

    def among(self, words: Tensor) -> SourceWords:
        """Renumbers the columns for an output layer of only ``words`` (N,), sorted, which include all source words."""
        return self._replace(ids=torch.searchsorted(words, self.ids))

    def padding(self, sentences: int, positions: int) -> SourceWords:
        """Returns source words of this type and device for ``sentences`` sentences of padding only."""
        columns = torch.arange(positions, device=self.ids.device).expand(sentences, -1).contiguous()
        shares = self.shares.new_zeros(sentences, positions)
        return SourceWords(torch.zeros_like(columns), columns, shares)


class CopyStep:
    """Computes the copy mixture of a step; weights and embeddings (V, I) are copied when the object is created."""

    def __init__(self, copying: Copying, embedding: Tensor, dtype: torch.dtype) -> None:
        exact = accumulate_dtype(dtype)
        of_context, of_state, of_word = (part.detach().to(exact).clone() for part in copying.weights)
        self._of_context, self._of_state = of_context, of_state
        self._of_word = embedding.to(exact) @ of_word + copying.bias.detach().to(exact)

    def prepare(self, source: Tensor, values: Tensor) -> SourceWords:
        """Prepares source words from ids (B, S) and the attention's values (B, S, E)."""
        shares = torch.matmul(values.to(self._of_context.dtype), self._of_context)
        return SourceWords(source, first_positions(source), shares)

    def __call__(
        self, log_probs: Tensor, tokens: Tensor, read: Tensor, attention: Tensor, state: Any
    ) -> Tensor:
        """Replaces the log-probabilities of the softmax (R, V), in place, by those of the mixture.

        Args:
            log_probs: (R, V). tokens: previous tokens, (R,). read: inputs of the output layer, (R, D).
            attention: (R, S). state: state of the rows after the step.
        """
        owners = state.owners
        ids, first, shares = (part.index_select(0, owners) for part in state.sources.words)
        seen = attention.to(shares.dtype)
        gates = self._of_word.index_select(0, tokens) + torch.mv(read.to(shares.dtype), self._of_state)
        return Copied(gates + (seen * shares).sum(1), seen, ids, first).mixed(log_probs)
