"""Searching among a few target words: those that a lexicon gives for the words of a sentence.

Most of the words of a vocabulary cannot stand in the translation of a sentence, and the output layer takes most of a
step's time; so it computes the words that one of a batch's sentences may have (L'Hostis et al., 2016, "Vocabulary
selection strategies for NMT"). Each sentence has probabilities over its own words alone, so that they never depend on
the other sentences of the batch.

Shapes: B sentences, S source positions, R rows, V target vocabulary, N words of a batch, K words of a source word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt.data.text.lexicon import NOTHING
from econmt.data.text.subwords import SPECIAL_TOKENS
from econmt.decoding.search.model import SearchModel


class Shortlists:
    """The target words that each sentence may have: of each of its words the most probable, and a few that all have.

    Args:
        table: (source vocabulary, K) int32 the translations of each source word, the most probable first, see
            :func:`econmt.data.text.lexicon.learn_lexicon`.
        size: V.
        top: how many of a source word's are taken; at most K.
        joint: whether both sides have one vocabulary; then words of the source may be copied.
    """

    def __init__(self, table: Tensor, size: int, top: int, joint: bool) -> None:
        self._table, self._size, self._joint = table[:, :top].long(), size, joint

    def allowed(self, source: Tensor, more: Sequence[Sequence[int]]) -> Tensor:
        """(B, V) bool the words of each sentence.

        Args:
            source: (B, S) ids, padded. more: ids that a sentence has in addition, for what is wished of it.
        """
        source = source.cpu() % len(self._table)  # beyond the words are their source factors
        found = torch.zeros(len(source), self._size, dtype=torch.bool)
        found.scatter_(1, self._table[source].flatten(1), True)
        found[:, self._table[NOTHING]] = True
        if self._joint:
            found.scatter_(1, source, True)
        for row, ids in enumerate(more):
            found[row, list(ids)] = True
        # A search names the special tokens by their ids.
        found[:, : len(SPECIAL_TOKENS)] = True
        return found


class Restricted:
    """A model whose sentences have shortlists; a :class:`SearchModel` itself, for one batch.

    Its words are numbered by their places in :attr:`words`, unless ``whole``: then log-probabilities are those of the
    whole vocabulary, -inf where a word is not in a sentence's list.

    Attributes:
        words: (N,) int64 the words of the batch, rising; the special tokens come first.
    """

    def __init__(self, model: SearchModel, allowed: Tensor, device: torch.device, *, whole: bool) -> None:
        """``allowed``: (B, V) bool, of the sentences that will be encoded."""
        self.words = allowed.any(dim=0).nonzero()[:, 0].to(device)
        self._model, self._whole, self._size = model, whole, allowed.shape[1]
        self._allowed = allowed.to(device)[:, self.words]

    def encode(self, source: Tensor, lengths: Tensor) -> Any:
        """See :class:`SearchModel`."""
        return self._model.encode(source, lengths)

    def initial_state(self, encoded: Any) -> Any:
        """See :class:`SearchModel`."""
        return self._model.restrict(self._model.initial_state(encoded), self.words, self._allowed)

    def length_ratios(self, encoded: Any) -> Tensor:
        """See :class:`SearchModel`."""
        return self._model.length_ratios(encoded)

    def restrict(self, state: Any, words: Tensor, allowed: Tensor) -> Any:
        """See :class:`SearchModel`."""
        return self._model.restrict(state, words, allowed)

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """See :class:`SearchModel`."""
        if not self._whole:
            return self._model.step(self.words[tokens], state)
        found, attention, state = self._model.step(tokens, state)
        log_probs = found.new_full((len(found), self._size), -torch.inf)
        return log_probs.index_copy_(1, self.words, found), attention, state

    def ids(self, numbers: Sequence[int]) -> list[int]:
        """The ids in the vocabulary of words as the search numbers them."""
        return list(numbers) if self._whole else self.words[list(numbers)].tolist()
