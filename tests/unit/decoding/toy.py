"""A model so small that its best translations are known by trying all of them.

Its log-probability of the next token is a random number that depends on the whole prefix and on the source sentence,
so no greedy shortcut finds the best translation.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.text.vocabulary import EOS, UNK

WORDS = (UNK, 4, 5)


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
        self.steps = 0
        self.rows: list[int] = []
        self.held: list[int] = []
        self.encoded = 0

    def table(self, sentence: int, prefix: int) -> Tensor:
        """Log-probabilities (V,) of the next token."""
        generator = torch.Generator().manual_seed((self.seed * 1009 + sentence) * 1_000_003 + prefix)
        logits = torch.randn(self.size, generator=generator) * self.spread
        logits[EOS] += self.end_bias
        return logits.log_softmax(dim=0)

    def encode(self, source: Tensor, lengths: Tensor) -> ToyState:
        self.encoded += 1
        count = len(lengths)
        return ToyState(
            source[:, 0], lengths, torch.arange(count), torch.zeros_like(lengths), 1, source.shape[1]
        )

    def step(self, tokens: Tensor, state: ToyState) -> tuple[Tensor, Tensor, ToyState]:
        self.steps += 1
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

    def everything(self, sentence: int, limit: int) -> list[tuple[tuple[int, ...], float]]:
        """All translations of at most ``limit`` tokens with their log-probabilities."""
        candidates = (ids for length in range(limit + 1) for ids in product(WORDS, repeat=length))
        return [(ids, self.log_probability(sentence, ids)) for ids in candidates]


def sources(*sentences: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Source ids and lengths of toy sentences; sentence n has n % 3 + 1 tokens and EOS."""
    lengths = torch.tensor([sentence % 3 + 2 for sentence in sentences])
    source = torch.zeros(len(sentences), width or int(lengths.max()), dtype=torch.int64)
    for row, (sentence, length) in enumerate(zip(sentences, lengths.tolist(), strict=True)):
        source[row, :length] = sentence
        source[row, length - 1] = EOS
    return source, lengths
