"""A model so small that its best translations are known by trying all of them.

Its log-probability of the next token is a random number that depends on the whole prefix and on the source sentence,
so no greedy shortcut finds the best translation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from econmt.data.text.vocabulary import EOS, UNK
from econmt.decoding.constraints.batch import ConstrainedContinuations, DecodingConstraints
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.fusion import ShallowFusion
from econmt.decoding.search.model import SearchModel

WORDS = (UNK, 4, 5)
LIMIT = 4
JOINS = torch.tensor([False, False, False, False, False, True])
"""Token 5 continues a word."""


class ToyState(NamedTuple):
    """(B,) the sentences and their source lengths; (R,) the cell of each row and its prefix as a number."""

    sentences: Tensor
    lengths: Tensor
    cells: Tensor
    prefixes: Tensor
    width: int
    positions: int

    def select(self, rows: Tensor, cells: Tensor, width: int) -> ToyState:
        """A search that lays rows into wrong cells, or two into one, shows."""
        assert len(set(cells.tolist())) == len(cells)
        assert torch.equal(cells // width, self.cells[rows] // self.width), "a row changes its sentence"
        return self._replace(cells=cells, prefixes=self.prefixes[rows], width=width)

    def keep(self, sentences: Tensor) -> ToyState:
        owners = self.cells // self.width
        where = {old: new for new, old in enumerate(sentences.tolist())}
        moved = torch.tensor([where[owner] for owner in owners.tolist()])
        cells = moved * self.width + self.cells % self.width
        return self._replace(
            sentences=self.sentences[sentences], lengths=self.lengths[sentences], cells=cells
        )


class ToyModel:
    """Reads the first source token as the number of the sentence. ``seed`` makes another model."""

    size = 6

    def __init__(self, seed: int = 0, end_bias: float = 0.0, spread: float = 1.5) -> None:
        self.seed = seed
        self.end_bias = end_bias
        self.spread = spread
        self.rows: list[int] = []
        self.held: list[int] = []
        self.encoded = 0
        self._tables: dict[tuple[int, int], Tensor] = {}

    def table(self, sentence: int, prefix: int) -> Tensor:
        """Log-probabilities (V,) of the next token, remembered since they take long to make anew."""
        if (sentence, prefix) not in self._tables:
            generator = torch.Generator().manual_seed((self.seed * 1009 + sentence) * 1_000_003 + prefix)
            logits = torch.randn(self.size, generator=generator) * self.spread
            logits[EOS] += self.end_bias
            self._tables[sentence, prefix] = logits.log_softmax(dim=0)
        return self._tables[sentence, prefix].clone()

    def encode(self, source: Tensor, lengths: Tensor) -> ToyState:
        self.encoded += 1
        count = len(lengths)
        return ToyState(
            source[:, 0], lengths, torch.arange(count), torch.zeros_like(lengths), 1, source.shape[1]
        )

    def step(self, tokens: Tensor, state: ToyState) -> tuple[Tensor, Tensor, ToyState]:
        self.rows.append(len(tokens))
        self.held.append(len(state.sentences))
        prefixes = state.prefixes * (self.size + 1) + tokens + 1
        owners = state.cells // state.width
        pairs = zip(state.sentences[owners].tolist(), prefixes.tolist(), strict=True)
        log_probs = torch.stack([self.table(sentence, prefix) for sentence, prefix in pairs])
        positions = torch.arange(state.positions)
        seen = (prefixes[:, None] % (positions + 2) + 1.0) * (positions < state.lengths[owners, None])
        return log_probs, seen / seen.sum(dim=1, keepdim=True), state._replace(prefixes=prefixes)

    def log_probability(self, sentence: int, ids: tuple[int, ...]) -> float:
        """Of ``ids`` and EOS."""
        total, prefix = 0.0, 0
        for before, token in zip((2, *ids), (*ids, EOS), strict=True):
            prefix = prefix * (self.size + 1) + before + 1
            total += float(self.table(sentence, prefix)[token].double())
        return total


def sources(*sentences: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Source ids and lengths of toy sentences; sentence n has n % 3 + 1 tokens and EOS."""
    lengths = torch.tensor([sentence % 3 + 2 for sentence in sentences])
    source = torch.zeros(len(sentences), width or int(lengths.max()), dtype=torch.int64)
    for row, (sentence, length) in enumerate(zip(sentences, lengths.tolist(), strict=True)):
        source[row, :length] = sentence
        source[row, length - 1] = EOS
    return source, lengths


def search(
    model: SearchModel,
    sentences: Sequence[int] = (0, 1, 2),
    limit: int | Sequence[int] = LIMIT,
    *,
    constraints: Sequence[DecodingConstraints] = (),
    joins: Tensor = JOINS,
    fusion: ShallowFusion | None = None,
    **options: Any,
) -> list[list[Hypothesis]]:
    """Beam search with the options of `SearchOptions`; ``limit``: that of all sentences, or of each."""
    settings = SearchOptions(**options)
    limits = torch.tensor([limit] * len(sentences) if isinstance(limit, int) else limit)
    chooser = ConstrainedContinuations(constraints, joins, settings) if constraints else None
    return beam_search(model, *sources(*sentences), limits, settings, chooser=chooser, fusion=fusion)


def everything(limit: int = LIMIT) -> Iterator[tuple[int, ...]]:
    """All translations of at most ``limit`` tokens."""
    return (ids for length in range(limit + 1) for ids in product(WORDS, repeat=length))


def judged(
    model: ToyModel, sentence: int, ids: tuple[int, ...], added: Sequence[float] = (), **options: Any
) -> tuple[float, float] | None:
    """Score and log-probability of a translation by definition; None if it is not allowed.

    ``added``: what another model adds to the log-probability of each token and EOS.
    """
    given = SearchOptions(**options)
    if len(ids) < given.min_output_length or (given.ban_unk and UNK in ids):
        return None
    width, length = sentence % 3 + 2, len(ids) + 1
    prefix, before, seen = 0, 2, [0.0] * width
    real = changed = 0.0
    for position, token in enumerate((*ids, EOS)):
        prefix = prefix * (model.size + 1) + before + 1
        value = float(model.table(sentence, prefix)[token])
        real += value
        value *= given.repetition_penalty if token in ids[:position] else 1.0
        changed += value - (given.unk_penalty if token == UNK else 0.0)
        changed += added[position] if added else 0.0
        weights = [prefix % (place + 2) + 1.0 for place in range(width)]
        seen = [total + weight / sum(weights) for total, weight in zip(seen, weights, strict=True)]
        before = token
    beta = given.length_penalty_beta
    score = changed / ((beta + length) / (beta + 1)) ** given.length_penalty_alpha
    score -= given.word_penalty * length
    ratio = given.brevity_penalty_constant_length_ratio * width / length
    score += given.brevity_penalty_weight * min(0.0, 1.0 - ratio)
    score += given.coverage_penalty_weight * sum(math.log(min(total, 1.0)) for total in seen[:-1])
    return score, real


def assert_best(
    found: Sequence[Sequence[Hypothesis]],
    model: ToyModel,
    limit: int = LIMIT,
    *,
    allowed: Callable[[int, tuple[int, ...]], bool] = lambda *_: True,
    **options: Any,
) -> None:
    """Checks that hypotheses of sentences 0, 1, ... are the best of all that are allowed, with their scores."""
    for sentence, hypotheses in enumerate(found):
        scored = [
            (*figures, ids)
            for ids in everything(limit)
            if allowed(sentence, ids) and (figures := judged(model, sentence, ids, **options)) is not None
        ]
        best = sorted(scored, reverse=True)[: options.get("nbest_size", 1)]
        assert_figures(hypotheses, best)


def assert_figures(hypotheses: Sequence[Hypothesis], expected: Sequence[tuple[Any, ...]]) -> None:
    """Checks that hypotheses have the scores, log-probabilities and ids with which the tuples begin."""
    assert [tuple(each.ids) for each in hypotheses] == [each[2] for each in expected]
    scores, reals = ([each[part] for each in expected] for part in (0, 1))
    assert [each.score for each in hypotheses] == pytest.approx(scores, abs=1e-5)
    assert [each.log_probability for each in hypotheses] == pytest.approx(reals, abs=1e-5)


def assert_same(
    found: Sequence[Sequence[Hypothesis]],
    expected: Sequence[Sequence[Hypothesis]],
    within: float = 0.0,
    whole: float = 1.0,
) -> None:
    """Checks that hypotheses are equal but for rounding: that of log-probabilities is ``whole`` times as large."""
    for ours, theirs in zip(found, expected, strict=True):
        assert [each.ids for each in ours] == [each.ids for each in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.score == pytest.approx(other.score, abs=within)
            assert one.log_probability == pytest.approx(other.log_probability, abs=whole * within)
            assert one.cut == other.cut
            assert (one.attention is None) == (other.attention is None)
            if one.attention is not None:
                torch.testing.assert_close(one.attention, other.attention, atol=within, rtol=0)
