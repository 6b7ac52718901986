"""BPE-dropout (Provilkov et al., 2020): every epoch segments words again, skipping each merge with probability p.

SentencePiece has a sampler too, but its thread-local generator cannot be saved, so that a resumed run would differ from
an uninterrupted one. This encoder makes the same choices with any NumPy generator and equals SentencePiece where no
merge is skipped.

The segmentation of a word is determined by its skipped merges. Most words have none or one, so segmentations are cached
by (word, skipped merges), and the number of merges until the next skip is drawn from a geometric distribution: a word
costs little more than a look-up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from econmt.data.batching.token_store import IntArray, PairIds, rectangle
from econmt.data.text.source_factors import with_factors_of
from econmt.data.text.vocabulary import UNK, WORD_START, SentencePieceVocabulary, Vocabularies, Vocabulary

_MAX_CACHED = 500_000
_DRAWS = 16
_TRIES = 4


class Cut(NamedTuple):
    """Segmentation of a word."""

    ids: tuple[int, ...]
    merges: int
    """Number of merges tried, including skipped ones."""


def gaps_between_skips(draw: np.random.Generator, dropout: float) -> Iterator[int]:
    """Yields without end the number of merges before the next skipped one, drawn in blocks."""
    while True:
        yield from (draw.geometric(dropout, size=_DRAWS)[::-1] - 1).tolist()


class BpeSampler:
    """Random segmentation of words with a SentencePiece BPE model, which skips a merge with probability ``dropout``."""

    def __init__(self, vocabulary: Vocabulary, dropout: float) -> None:
        assert isinstance(vocabulary, SentencePieceVocabulary)
        assert 0.0 < dropout < 1.0
        processor = vocabulary.processor
        self.dropout = dropout
        self._pieces = [str(processor.IdToPiece(i)) for i in range(vocabulary.size)]
        self._ids = {
            piece: i for i, piece in enumerate(self._pieces) if i > UNK and not processor.IsControl(i)
        }
        self._ranks = {piece: -float(processor.GetScore(i)) for piece, i in self._ids.items()}
        self._starts_word = [piece.startswith(WORD_START) for piece in self._pieces]
        self._cuts: dict[tuple[tuple[int, ...], tuple[int, ...]], Cut] = {}

    def cut(self, word: tuple[int, ...], skipped: tuple[int, ...]) -> Cut:
        """Segments a word, given as ids of any segmentation, without the merges ``skipped`` (from 0, sorted)."""
        key = (word, skipped)
        segmentation = self._cuts.get(key)
        if segmentation is None:
            if len(self._cuts) >= _MAX_CACHED:
                self._cuts.clear()
            segmentation = self._merge(word, skipped)
            if not skipped and len(word) == 1 and segmentation.ids != word:  # not the result of merges: a tag
                segmentation = Cut(word, 0)
            self._cuts[key] = segmentation
        return segmentation

    def _merge(self, word: tuple[int, ...], skipped: tuple[int, ...]) -> Cut:
        if UNK in word:  # the characters of <unk> are lost
            return Cut(word, 0)
        symbols = list("".join(self._pieces[i] for i in word))
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        agenda: list[tuple[float, int, int, str]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                merged = symbols[left] + symbols[right]
                rank = self._ranks.get(merged)
                if rank is not None:
                    heapq.heappush(agenda, (rank, left, right, merged))

        for left in range(len(symbols) - 1):
            propose(left, left + 1)
        turn = 0
        while agenda:
            _, left, right, merged = heapq.heappop(agenda)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != merged:
                continue  # one of the two was merged with another symbol meanwhile
            turn += 1
            if turn - 1 in skipped:
                continue
            symbols[left], symbols[right] = merged, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            propose(before[left], left)
            propose(left, after[left])
        return Cut(tuple(self._ids.get(symbol, UNK) for symbol in symbols if symbol), turn)

    def sample(self, ids: Sequence[int], gaps: Iterator[int]) -> list[int]:
        """Segments an encoded sentence at random, by the numbers that :func:`gaps_between_skips` yields."""
        result: list[int] = []
        gap = next(gaps)
        for word in self._words(ids):
            cut = self.cut(word, ())
            skipped: tuple[int, ...] = ()
            done = 0
            while done + gap < cut.merges:
                skipped += (done + gap,)
                done += gap + 1
                cut = self.cut(word, skipped)
                gap = next(gaps)
            gap -= cut.merges - done
            result.extend(cut.ids)
        return result

    def _words(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        starts = [index for index, i in enumerate(ids) if index == 0 or self._starts_word[i]]
        ends = [*starts[1:], len(ids)]
        return [tuple(ids[start:end]) for start, end in zip(starts, ends, strict=False)]


def dropout_capacity(dropout: float, max_length: int) -> IntArray:
    """Returns the space to reserve for the random segmentation of a side of 0, 1, ... tokens, (max_length + 1,) tokens.

    On German and English the mean growth is about 3 p for small p, so that 1 + 5 p and a few tokens more suffice for
    nearly all; a longer segmentation is drawn again. No capacity exceeds ``max_length``.
    """
    lengths = np.arange(max_length + 1)
    stretched: IntArray = np.ceil(lengths * (1.0 + 5.0 * dropout)).astype(np.int64) + 4
    return np.minimum(stretched, max_length)


class BpeDropout:
    """BPE-dropout of both sides of the pairs of a batch."""

    def __init__(self, vocabularies: Vocabularies, dropout: float) -> None:
        self._source = BpeSampler(vocabularies.source, dropout)
        joint = vocabularies.source is vocabularies.target
        self._target = self._source if joint else BpeSampler(vocabularies.target, dropout)
        self.probability = dropout
        self._factored = vocabularies.source if vocabularies.factors else None

    def resample(
        self, indices: IntArray, pairs: PairIds, max_lengths: tuple[int, int], seed: tuple[int, int]
    ) -> PairIds:
        """Segments the pairs of a batch at random.

        Args:
            indices: indices of the pairs, (B,); the generator of a pair is seeded with ``seed`` and its index.
            pairs: token ids from :meth:`TokenStore.gather`.
            max_lengths: maximum numbers of source and target tokens; the pairs themselves fit.
            seed: seed of the run and epoch.
        """
        sources: list[list[int]] = []
        targets: list[list[int]] = []
        for index, source, target in zip(indices.tolist(), *pairs.lists(), strict=True):
            draw = np.random.Generator(np.random.PCG64([*seed, index]))
            gaps = gaps_between_skips(draw, self.probability)
            if self._factored is None:
                sources.append(_sample_within(self._source, source, gaps, max_lengths[0]))
            else:
                words = [token % self._factored.size for token in source]
                cut = _sample_within(self._source, words, gaps, max_lengths[0])
                sources.append(with_factors_of(source, cut, self._factored))
            targets.append(_sample_within(self._target, target, gaps, max_lengths[1]))
        return PairIds(*rectangle(sources), *rectangle(targets))


def _sample_within(sampler: BpeSampler, ids: list[int], gaps: Iterator[int], max_length: int) -> list[int]:
    for _ in range(_TRIES):
        cut = sampler.sample(ids, gaps)
        if len(cut) <= max_length:
            return cut
    return ids
