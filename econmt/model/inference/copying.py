"""Copying in a search: see :mod:`econmt.model.copying`.

Shapes: B sentences, S source positions, R rows (hypotheses), V vocabulary, E encoder size, D width of what the output
layer reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt.model.copying import Copied, Copying, first_places
from econmt_ops.core.precision import accumulate_dtype


class SourceWords(NamedTuple):
    """Source words of B sentences that may be copied.

    Attributes:
        ids: (B, S) the words, as columns of the output layer. first: (B, S) where each first stands.
        shares: (B, S) of the values in the gate.
    """

    ids: Tensor
    first: Tensor
    shares: Tensor

    def keep(self, sentences: Tensor, size: int) -> SourceWords:
        """The first ``size`` positions of the sentences with indices ``sentences`` (C,)."""
        return SourceWords(*(part[:, :size].index_select(0, sentences) for part in self))

    def among(self, words: Tensor) -> SourceWords:
        """Restricts the columns to an output layer of ``words`` (N,) alone, rising, which include these."""
        return self._replace(ids=torch.searchsorted(words, self.ids))

    def room(self, sentences: int, positions: int) -> SourceWords:
        """For other sentences: padding at each position."""
        places = torch.arange(positions, device=self.ids.device).expand(sentences, -1).contiguous()
        shares = self.shares.new_zeros(sentences, positions)
        return SourceWords(torch.zeros_like(places), places, shares)


class CopyStep:
    """Makes the mixture of a step.

    Weights are copied: after they have changed, make a new one.

    Args:
        copying: the gate. embedding: (V, I) of the target. dtype: of what the decoder puts out.
    """

    def __init__(self, copying: Copying, embedding: Tensor, dtype: torch.dtype) -> None:
        exact = accumulate_dtype(dtype)
        of_context, of_state, of_word = (part.detach().to(exact).clone() for part in copying.weights)
        self._of_context, self._of_state = of_context, of_state
        self._of_word = embedding.to(exact) @ of_word + copying.bias.detach().to(exact)

    def prepare(self, source: Tensor, values: Tensor) -> SourceWords:
        """Prepares source words from ids (B, S) and the attention's values (B, S, E)."""
        shares = torch.matmul(values.to(self._of_context.dtype), self._of_context)
        return SourceWords(source, first_places(source), shares)

    def __call__(
        self, log_probs: Tensor, tokens: Tensor, read: Tensor, attention: Tensor, state: Any
    ) -> Tensor:
        """The mixture's log-probabilities in the place of those of the softmax (R, V).

        Args:
            log_probs: (R, V). tokens: (R,) read. read: (R, D) by the output layer. attention: (R, S).
            state: of the rows, after the step.
        """
        owners = state.owners
        ids, first, shares = (part.index_select(0, owners) for part in state.sources.words)
        seen = attention.to(shares.dtype)
        gates = self._of_word.index_select(0, tokens) + torch.mv(read.to(shares.dtype), self._of_state)
        return Copied(gates + (seen * shares).sum(1), seen, ids, first).mixed(log_probs)
