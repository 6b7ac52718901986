"""Guides of training pairs in batches: word alignments, assigned to the tokens of a segmentation, and weights.

Alignments are stored by words, so that they follow any segmentation, such as that of BPE-dropout: a target token is
aligned to all tokens of the source words to which its word is aligned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from econmt.data.batching.token_store import IntArray, PairIds, TokenStore
from econmt.data.text.vocabulary import WORD_START, Vocabularies, Vocabulary

Int64Array = npt.NDArray[np.int64]


class PairGuides(NamedTuple):
    """Alignments and weights of the pairs of a store.

    Attributes:
        store: the pairs, with their weights if they have any.
        links: alignments, a pair of equally many source words and target words for each pair; None without.
        starts: for each side True for the tokens that begin a word, (V,); None if each token is a word.
    """

    store: TokenStore
    links: TokenStore | None
    starts: tuple[npt.NDArray[np.bool_] | None, npt.NDArray[np.bool_] | None]

    @classmethod
    def of(cls, store: TokenStore, links: TokenStore | None, vocabularies: Vocabularies) -> PairGuides | None:
        """Returns the guides of a store; None if it has neither alignments nor weights."""
        if links is None and not store.weighted:
            return None
        source, target = (_starts(vocabulary) for vocabulary in vocabularies.sides)
        return cls(store, links, (source, target))

    def alignment(self, indices: IntArray, pairs: PairIds, shape: tuple[int, int]) -> Int64Array | None:
        """Returns 1 where tokens are aligned, else 0, (B, T, S); None without alignments.

        Args:
            indices: indices of the pairs, (B,). pairs: their tokens. shape: S and T.
        """
        if self.links is None:
            return None
        links = self.links.gather(indices)
        source = _word_numbers(pairs.source, self.starts[0])
        target = _word_numbers(pairs.target, self.starts[1])
        words = np.zeros((len(indices), _most(target, links.target), _most(source, links.source)), np.int64)
        rows, columns = np.nonzero(np.arange(links.source.shape[1]) < links.source_lengths[:, None])
        words[rows, links.target[rows, columns], links.source[rows, columns]] = 1
        aligned = words[np.arange(len(indices))[:, None, None], target[:, :, None], source[:, None, :]]
        aligned *= (np.arange(target.shape[1]) < pairs.target_lengths[:, None])[:, :, None]
        aligned *= (np.arange(source.shape[1]) < pairs.source_lengths[:, None])[:, None, :]
        alignment = np.zeros((len(indices), shape[1], shape[0]), np.int64)
        height, width = min(target.shape[1], shape[1]), min(source.shape[1], shape[0])
        alignment[:, :height, :width] = aligned[:, :height, :width]
        return alignment


def _starts(vocabulary: Vocabulary) -> npt.NDArray[np.bool_] | None:
    if not vocabulary.of_pieces:
        return None
    tokens = vocabulary.tokens(range(vocabulary.size))
    return np.array([token.startswith(WORD_START) for token in tokens])


def _word_numbers(ids: IntArray, starts: npt.NDArray[np.bool_] | None) -> Int64Array:
    """Returns the number of the word of each token of ids (B, N), joint ids or not, (B, N)."""
    if starts is None:
        return np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    begins = starts[ids % len(starts)]
    begins[:, :1] = True
    numbers: Int64Array = begins.cumsum(axis=1) - 1
    return numbers


def _most(numbers: Int64Array, linked: IntArray) -> int:
    return 1 + int(max(numbers.max(initial=0), linked.max(initial=0)))
