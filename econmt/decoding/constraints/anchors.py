"""Anchors of glossary terms: the source tokens that a term translates, and the attention of hypotheses to them.

The translation of a term may begin only where the attention is on its source tokens (compare Hasler et al., 2018,
"Neural machine translation decoding with terminology constraints"). These tokens count as translated by it: a
hypothesis pays for other target tokens that attend to them, and one that has translated them otherwise is lost. If all
hypotheses of a sentence are lost, or none ever attends to a term, its translation is written where the sentence would
end.

Shapes: B sentences, R rows, P phrases of a sentence, M different tokens of a sentence's phrases, S source positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt.decoding.constraints.inclusion import Automata, Phrase

LEAST_ATTENTION = 0.5
"""Least share of the attention on a term's source tokens with which its translation may begin."""
LEAST_OF_MODEL = 0.1
"""Least share where the model itself would write the translation; with less it counts as any other text."""
MOST_SPENT = 0.9
"""Attention of other target tokens after which a term's source tokens count as translated by them."""
COST = 1.0
"""Cost, as a negative log-probability, of a target token outside of terms whose whole attention is on a term."""


class Anchors:
    """Anchors of a batch's phrases, tracked through a beam search.

    Args:
        phrases: phrases of each sentence. spans: source positions of each phrase; none: the phrase has no anchor.
        automata: automata of the phrases.

    Attributes:
        any: True if a phrase has an anchor.
        growth: tokens by which the terms' translations are longer than the terms, (B,).
        given: log-probability of the tokens of terms in each row, (R,) float64.
    """

    def __init__(
        self,
        phrases: Sequence[Sequence[Phrase]],
        spans: Sequence[Sequence[Sequence[int]]],
        automata: Automata,
    ) -> None:
        self._phrases, self._spans, self._automata = phrases, spans, automata
        shape = len(phrases), max(map(len, phrases))
        self._anchored = torch.zeros(shape, dtype=torch.bool)
        for sentence, of_sentence in enumerate(spans):
            for number, span in enumerate(of_sentence):
                self._anchored[sentence, number] = bool(span)
        self.any = bool(self._anchored.any())
        self.growth = torch.tensor(
            [
                sum(len(phrase.ids) - len(span) for phrase, span in zip(*each, strict=True) if span)
                for each in zip(phrases, spans, strict=True)
            ]
        )
        # For each row and phrase: number of the step that began it, 0 if none has; attention of other tokens before.
        self._begun = torch.zeros(shape, dtype=torch.int64)
        self._spent = torch.zeros(shape, dtype=torch.float64)
        self._attention = torch.zeros(shape, dtype=torch.float64)
        self.given = torch.zeros(shape[0], dtype=torch.float64)
        self._offered = torch.zeros(0), torch.zeros(0)
        self._step = 0
        self._mask = torch.zeros(0)
        self._tables: dict[int, Tensor] = {}

    def look(self, attention: Tensor, owners: Tensor) -> None:
        """Reads the attention (R, S) of a step; ``owners`` (R,) are the rows' sentences."""
        self._step += 1
        width = attention.shape[1]
        if self._step == 1:
            self._mask = torch.zeros(*self._anchored.shape, width, device=attention.device)
            for sentence, of_sentence in enumerate(self._spans):
                for number, span in enumerate(of_sentence):
                    self._mask[sentence, number, list(span)] = 1.0
        mask = self._mask[owners.to(attention.device), :, :width]
        self._attention = (mask * attention.float()[:, None, :]).sum(dim=2).cpu().double()

    def costs(self, values: Tensor, tokens: Tensor, outside: Tensor) -> Tensor:
        """Returns the costs (R, W) float64 of candidate ``tokens`` of log-probabilities ``values``, all (R, W).

        ``outside`` (R, W) is True for tokens that belong to no term; only these have a cost.
        """
        self._offered = values, tokens
        return COST * self._attention.sum(dim=1)[:, None] * outside

    def lost(self, owners: Tensor) -> Tensor:
        """Returns (R,) bool, True for rows that have translated a term in another way."""
        missing = self._anchored[owners] & (self._begun == 0)
        return (missing & (self._spent >= MOST_SPENT)).any(dim=1)

    def away(self, states: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Returns two masks (R, M) of the tokens that would begin a phrase, but not at its anchor.

        Those of the first are not offered, those of the second do not begin the phrase if the model writes them.
        """
        begins = torch.stack([self._table(state) for state in states.tolist()])
        possible, free = (self._spent < MOST_SPENT) & (self._begun == 0), ~self._anchored[owners]
        masks = []
        for least, allowed in ((LEAST_ATTENTION, possible), (LEAST_OF_MODEL, self._begun == 0)):
            here = free | (allowed & (self._attention >= least))
            masks.append(begins.any(dim=2) & ~(begins & here[:, None, :]).any(dim=2))
        return masks[0], masks[1]

    def grow(self, parents: Tensor, owners: Tensor, tokens: Tensor, before: Tensor, after: Tensor) -> None:
        """Informs that ``tokens`` extend the rows ``parents`` of sentences ``owners``, all (R',).

        ``before`` and ``after`` (R',) are the automata's states.
        """
        begun, attention = self._begun[parents], self._attention[parents]
        outside = self._automata.remaining(after) >= self._automata.remaining(before)
        counted = outside[:, None] & (attention >= LEAST_ATTENTION)
        self._spent = self._spent[parents] + attention * counted
        values, offered = (part[parents] for part in self._offered)
        written = values.masked_fill(offered != tokens[:, None], -torch.inf).amax(dim=1).double()
        self.given = self.given[parents] + written.masked_fill(outside, 0.0)
        for row in (~outside).nonzero()[:, 0].tolist():
            column = self._automata.tokens[owners[row]].tolist().index(int(tokens[row]))
            candidates = self._table(int(before[row]))[column] & (begun[row] == 0)
            if candidates.any():
                begun[row, attention[row].masked_fill(~candidates, -1.0).argmax()] = self._step
        lapsed = self._automata.remaining(after) > self._automata.remaining(before)
        for row in lapsed.nonzero()[:, 0].tolist():
            self._take_back(row, begun[row], int(after[row]))
        self._begun = begun

    def _take_back(self, row: int, begun: Tensor, state: int) -> None:
        """Marks phrases that a row has begun in ``begun`` (P,), but not continued, as translated in another way."""
        sentence, missing = self._automata.missing(state)
        last_first = sorted(begun.nonzero()[:, 0].tolist(), key=lambda number: -int(begun[number]))
        for number in last_first:
            phrase = self._phrases[sentence][number]
            same = [at for at, each in enumerate(self._phrases[sentence]) if each == phrase]
            if sum(int(begun[at]) > 0 for at in same) > len(same) - missing.get(phrase, 0):
                begun[number] = 0
                self._spent[row, number] = MOST_SPENT

    def _table(self, state: int) -> Tensor:
        """Returns (M, P) bool, True for the phrases that a token would begin after a state."""
        if state not in self._tables:
            tokens = self._automata.tokens
            table = torch.zeros(tokens.shape[1], self._anchored.shape[1], dtype=torch.bool)
            sentence, missing = self._automata.missing(state)
            if not self._automata.is_within(state):
                for number, phrase in enumerate(self._phrases[sentence]):
                    table[:, number] = (tokens[sentence] == phrase.ids[0]) & (phrase in missing)
            self._tables[state] = table
        return self._tables[state]
