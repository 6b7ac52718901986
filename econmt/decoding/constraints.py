"""Which phrases a growing translation still has to hold, and the places of a beam shared out by that.

Dynamic beam allocation (Post and Vilar, 2018): the continuations of a sentence's hypotheses are the most probable ones
and those that go on with a phrase that is still wanted. They are sorted into banks by how many tokens of phrases they
hold, and places go to the banks in turn, so that hypotheses which have paid for an improbable phrase do not compete
with those which have not. All sentences of a batch are shared out at once, as by Hu et al. (2019).

A phrase is there where its tokens follow one another and no letter goes on with its last word. A token counts for one
phrase; of two phrases that begin alike the longer one counts if it is written.

Shapes: B sentences, R rows, N continuations of a sentence, M different tokens of a sentence's phrases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_OTHER, _JOINING = -1, -2
"""Stand for any token that is in no phrase: one that begins a word, and one that goes on with it."""


class Phrase(NamedTuple):
    """What a translation must hold: its tokens, and whether the one after them must not go on with a word."""

    ids: tuple[int, ...]
    ends_word: bool


class Progress(NamedTuple):
    """How far a hypothesis has come.

    Attributes:
        unmet: the phrases that it still has to hold, by number.
        matched: its last tokens, so far as they begin one of these.
        pending: the phrase among them that begins ``matched``, or is all of it, or -1: it is there unless the next
            token goes on with its last word, or a longer one is.
    """

    unmet: tuple[int, ...]
    matched: tuple[int, ...]
    pending: int


class Phrases:
    """The phrases of one sentence as an automaton over tokens.

    Args:
        phrases: several may be alike; each is wanted then.
        joins: whether a token goes on with a word.
    """

    def __init__(self, phrases: Sequence[Phrase], joins: Sequence[bool]) -> None:
        self._phrases, self._joins = phrases, joins
        self.tokens = sorted({token for phrase in phrases for token in phrase.ids})
        self._firsts = {phrase.ids[0] for phrase in phrases}
        self.size = sum(len(phrase.ids) for phrase in phrases)
        self.start = Progress(tuple(range(len(phrases))), (), -1)

    def remaining(self, progress: Progress) -> int:
        """The fewest tokens after which everything is there; one of ``tokens`` always makes it one less."""
        return sum(len(self._phrases[number].ids) for number in progress.unmet) - len(progress.matched)

    def moving(self, progress: Progress) -> list[tuple[int, bool]]:
        """``tokens``, and whether each may lead elsewhere than tokens that are in no phrase."""
        unmet, matched, _ = progress
        if len(matched) > 1:
            return [(token, True) for token in self.tokens]
        phrases = [self._phrases[number].ids for number in unmet]
        moves = {ids[0] for ids in phrases} | {
            ids[1] for ids in phrases if len(ids) > 1 and matched == ids[:1]
        }
        return [(token, token in moves) for token in self.tokens]

    def after(self, progress: Progress, token: int) -> Progress:
        """Where ``token`` leads."""
        unmet, matched, pending = progress
        if not matched and token not in self._firsts:
            return progress
        joins = token == _JOINING or (token >= 0 and self._joins[token])
        if pending >= 0 and joins and self._phrases[pending].ends_word:
            pending = -1 if len(matched) == len(self._phrases[pending].ids) else pending
        grown = (*matched, token)
        fitting = [number for number in unmet if self._phrases[number].ids[: len(grown)] == grown]
        if fitting:
            whole = (number for number in fitting if len(self._phrases[number].ids) == len(grown))
            return Progress(unmet, grown, next(whole, pending))
        if pending >= 0:
            unmet = tuple(number for number in unmet if number != pending)
            rest = grown[len(self._phrases[pending].ids) :]
        else:
            rest = grown[1:] if matched else ()
        found = Progress(unmet, (), -1)
        for each in rest:
            found = self.after(found, each)
        return found


class Automata:
    """Those of all sentences of a batch, in tables by which many hypotheses are moved at once.

    Args:
        sentences: the phrases of each.
        joins: (V,) bool whether a token goes on with a word.
    """

    def __init__(self, sentences: Sequence[Phrases], joins: Tensor) -> None:
        self._sentences, self._joins, self._flags = sentences, joins, joins.tolist()
        self._known: dict[tuple[int, Progress], int] = {}
        self._progress: list[tuple[int, Progress]] = []
        most = max(len(sentence.tokens) for sentence in sentences)
        tokens = [[*sentence.tokens, *[_OTHER] * (most - len(sentence.tokens))] for sentence in sentences]
        self.tokens = torch.tensor(tokens, dtype=torch.int64).view(len(sentences), most)
        self.sizes = torch.tensor([sentence.size for sentence in sentences])
        # The last two columns are where other tokens lead.
        self._next = np.zeros((64, most + 2), dtype=np.int64)
        self._remaining = np.zeros(64, dtype=np.int64)
        self._ready = np.zeros(64, dtype=bool)

    def start(self, prefixes: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """The states (B,) of hypotheses without tokens, and what is still wanted after the prefixes."""
        wanted = []
        for sentence, prefix in zip(self._sentences, prefixes, strict=True):
            progress = sentence.start
            for token in prefix:
                progress = sentence.after(progress, token)
            wanted.append(sentence.remaining(progress))
        states = [self._number(at, sentence.start) for at, sentence in enumerate(self._sentences)]
        found = torch.tensor(states, dtype=torch.int64)
        self.expand(found)
        return found, wanted

    def remaining(self, states: Tensor) -> Tensor:
        """Tokens that states still want, of their shape."""
        return torch.from_numpy(self._remaining)[states]

    def at_word_end(self, states: Tensor) -> Tensor:
        """(R,) bool whether a phrase is there unless the next token goes on with its last word."""
        after = self.remaining(torch.from_numpy(self._next)[states][:, -2:])
        return after[:, 0] < after[:, 1]

    def offered(self, states: Tensor) -> Tensor:
        """(R, M) bool which tokens of ``tokens`` bring ``states`` (R,) one step further."""
        after = self.remaining(torch.from_numpy(self._next)[states][:, :-2])
        return after == self.remaining(states)[:, None] - 1

    def after(self, states: Tensor, sentences: Tensor, tokens: Tensor) -> Tensor:
        """Where ``tokens`` (R, W) lead from ``states`` (R,) of ``sentences`` (R,): (R, W)."""
        most = self.tokens.shape[1]
        columns = most + self._joins[tokens].long()
        for column in range(most):
            columns = torch.where(self.tokens[sentences, column][:, None] == tokens, column, columns)
        return torch.from_numpy(self._next)[states].gather(1, columns)

    def expand(self, states: Tensor) -> None:
        """Fills in where ``states`` (R,) lead; before that nothing but what they want is known of them."""
        for state in set(states.tolist()):
            if self._ready[state]:
                continue
            at, progress = self._progress[state]
            sentence = self._sentences[at]
            others = [self._number(at, sentence.after(progress, token)) for token in (_OTHER, _JOINING)]
            led = [
                self._number(at, sentence.after(progress, token)) if moves else others[self._flags[token]]
                for token, moves in sentence.moving(progress)
            ]
            led += [others[0]] * (self.tokens.shape[1] - len(led)) + others
            self._next[state] = led
            self._ready[state] = True

    def _number(self, at: int, progress: Progress) -> int:
        number = self._known.setdefault((at, progress), len(self._progress))
        if number == len(self._progress):
            self._progress.append((at, progress))
            if number == len(self._remaining):
                self._next = np.concatenate([self._next, np.zeros_like(self._next)])
                self._remaining = np.concatenate([self._remaining, np.zeros_like(self._remaining)])
                self._ready = np.concatenate([self._ready, np.zeros_like(self._ready)])
            self._remaining[number] = self._sentences[at].remaining(progress)
        return number


def share_out(totals: Tensor, banks: Tensor, beam: int) -> Tensor:
    """The continuations that get a place, those before others that should get one rather: (B, beam) int64.

    The best of each bank come first, those of fuller banks before; then the second of each, and so on. Where there are
    fewer banks than places, each has its share, and what a bank cannot fill goes to the others.

    Args:
        totals: (B, N) log-probabilities, -inf for what may not be chosen; there may be fewer than ``beam`` others.
        banks: (B, N) tokens of phrases that each holds.
    """
    count = totals.shape[1]
    by_total = totals.argsort(dim=1, descending=True, stable=True)
    sorted_banks = banks.gather(1, by_total).masked_fill(totals.gather(1, by_total) == -torch.inf, -1)
    by_bank = sorted_banks.argsort(dim=1, descending=True, stable=True)
    order, sorted_banks = by_total.gather(1, by_bank), sorted_banks.gather(1, by_bank)
    # A continuation's rank in its bank is its place less that of the bank's first.
    at = torch.arange(count).expand_as(order)
    first = torch.ones_like(order, dtype=torch.bool)
    first[:, 1:] = sorted_banks[:, 1:] != sorted_banks[:, :-1]
    rank = at - torch.where(first, at, 0).cummax(dim=1).values
    rank = rank.masked_fill(sorted_banks < 0, count)
    chosen = rank.argsort(dim=1, stable=True)[:, :beam]
    return order.gather(1, chosen)
