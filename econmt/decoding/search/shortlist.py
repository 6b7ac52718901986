"""Shortlists: a search among the target words that a lexicon lists for the words of a sentence.

The output layer takes most of the time of a step, but most words cannot occur in the translation of a given sentence.
With shortlists it computes only words of some sentence of the batch (L'Hostis et al., 2016, "Vocabulary selection
strategies for NMT"). Probabilities are normalised over the words of each sentence, so that they do not depend on other
sentences of the batch.

Shapes: B sentences, S source positions, R rows, V target vocabulary, N words of a batch, K words per source word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt.data.text.lexicon import EMPTY_WORD
from econmt.data.text.vocabulary import EOS, PAD, SPECIAL_TOKENS
from econmt.decoding.search.model import SearchModel


class Shortlists:
    """Allowed target words of each sentence: the most probable translations of its words, and words allowed for all.

    Args:
        table: translations of each source word, the most probable first, (source vocabulary, K) int32, see
            :func:`econmt.data.text.lexicon.learn_lexicon`.
        size: V. top: number of translations used per source word, at most K.
        joint: True if both sides share a vocabulary; source words are then allowed too.
    """

    def __init__(self, table: Tensor, size: int, top: int, joint: bool) -> None:
        self._table, self._size, self._joint = table[:, :top].long(), size, joint

    def allowed(self, source: Tensor, more: Sequence[Sequence[int]]) -> Tensor:
        """Returns a mask (B, V) of the words allowed for each sentence of ``source`` (B, S), ids with padding.

        ``more`` has additional ids for each sentence, those of its constraints.
        """
        source = source.cpu() % len(self._table)  # removes source factors from joint ids
        source = source.where(source != PAD, EOS)  # which every sentence has
        allowed = torch.zeros(len(source), self._size, dtype=torch.bool)
        allowed.scatter_(1, self._table[source].flatten(1), True)
        allowed[:, self._table[EMPTY_WORD]] = True
        if self._joint:
            allowed.scatter_(1, source, True)
        for row, ids in enumerate(more):
            allowed[row, list(ids)] = True
        # Searches use the ids of special tokens, which must not be renumbered.
        allowed[:, : len(SPECIAL_TOKENS)] = True
        return allowed


class Restricted:
    """Model with shortlists for the sentences of one batch; implements :class:`SearchModel`.

    Words are numbered by their index in :attr:`words`. With ``whole`` they keep their ids, and log-probabilities cover
    the whole vocabulary, -inf for words that are not allowed.

    Attributes:
        words: ids of the batch's allowed words, sorted, special tokens first, (N,) int64.
    """

    def __init__(self, model: SearchModel, allowed: Tensor, device: torch.device, *, whole: bool) -> None:
        """Initialises the model for sentences with the mask ``allowed`` (B, V)."""
        self.words = allowed.any(dim=0).nonzero()[:, 0].to(device)
        self._model, self._whole, self._size = model, whole, allowed.shape[1]
        self._allowed = allowed.to(device)[:, self.words]

    def encode(self, source: Tensor, lengths: Tensor) -> Any:
        """See :class:`SearchModel`."""
        return self._model.restrict(self._model.encode(source, lengths), self.words, self._allowed)

    def restrict(self, state: Any, words: Tensor, allowed: Tensor) -> Any:
        """See :class:`SearchModel`."""
        return self._model.restrict(state, words, allowed)

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """See :class:`SearchModel`."""
        if not self._whole:
            return self._model.step(self.words[tokens], state)
        listed, attention, state = self._model.step(tokens, state)
        log_probs = listed.new_full((len(listed), self._size), -torch.inf)
        return log_probs.index_copy_(1, self.words, listed), attention, state

    def ids(self, numbers: Sequence[int]) -> list[int]:
        """Converts the search's word numbers to ids of the vocabulary."""
        return list(numbers) if self._whole else self.words[list(numbers)].tolist()
