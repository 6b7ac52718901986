"""Phrases that a translation must contain, and the allocation of a beam by them.

Dynamic beam allocation (Post and Vilar, 2018): the continuations of a sentence's hypotheses are the most probable ones
and those that continue a phrase that is still missing. They are sorted into banks by the number of tokens of phrases
that they have, and the beam is filled from the banks in turn, so that hypotheses with an improbable phrase do not
compete with those without. All sentences of a batch are allocated at once (Hu et al., 2019).

A translation contains a phrase if its tokens follow one another and no letter continues its last word. A token counts
for one phrase only. Which tokens belong to which phrase may be decided later: of the phrases "a b" and "a a", the text
"a a b a a" contains both, with the last two tokens for the second. So each hypothesis keeps every reading of its tokens
that may turn out to be the best.

Shapes: B sentences, R rows, N continuations of a sentence, M different tokens of a sentence's phrases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from econmt.decoding.constraints.phrases import is_of_word

_OTHER, _JOINING = -1, -2
"""Placeholders for tokens in no phrase: those that begin a word or are no word, and those that continue a word."""

_BETWEEN, _ENDED = -2, -1
"""Kinds of a :class:`Reading` between phrases, and just after a phrase whose last word could continue."""

MOST_READINGS = 32
"""Maximum number of readings of a hypothesis between phrases, and within one: 2 ** 5 for five ambiguous choices."""


class Phrase(NamedTuple):
    """Phrase that a translation must contain: its tokens, and True if the next token must not continue a word."""

    ids: tuple[int, ...]
    ends_word: bool


class Reading(NamedTuple):
    """One way to divide the tokens of a hypothesis among the phrases.

    Attributes:
        remaining: fewest tokens after which all phrases are complete.
        kind: index of the phrase that the last tokens begin, among the distinct phrases; ``_BETWEEN``: none;
            ``_ENDED``: none, and the reading is invalid if the next token continues the word.
        written: number of tokens of that phrase that are written.
        unmet: a bit for each phrase that is neither complete nor begun.
    """

    remaining: int
    kind: int
    written: int
    unmet: int

    def covers(self, other: Reading) -> bool:
        """Returns True if every text that completes ``other`` completes this reading as well."""
        alike = (self.kind, self.written) == (other.kind, other.written)
        return (self.kind == _BETWEEN or alike) and not self.unmet & ~other.unmet


Progress = tuple[Reading, ...]
"""Readings of a hypothesis of which none covers another, those with the fewest remaining tokens first."""


class Phrases:
    """The phrases of one sentence, equal ones counted separately, as an automaton over tokens.

    A hypothesis contains all phrases if one of its readings does. A search among all readings may take exponential
    time, so of the readings between phrases, and of the others, ``MOST_READINGS`` each are kept; only texts in
    which many phrases overlap at many places have more. ``joins`` is True for each token that continues a word.
    """

    def __init__(self, phrases: Sequence[Phrase], joins: Sequence[bool]) -> None:
        self._joins = joins
        in_order = sorted(phrases)
        self._kinds = sorted(set(phrases))
        # Equal phrases have adjacent bits, which are cleared from the highest on, so that equal sets of missing phrases
        # are equal numbers.
        self._bits = [
            sum(1 << at for at, each in enumerate(in_order) if each == kind) for kind in self._kinds
        ]
        self._begun: dict[int, list[int]] = {}
        for number, kind in enumerate(self._kinds):
            self._begun.setdefault(kind.ids[0], []).append(number)
        self.tokens = sorted({token for phrase in phrases for token in phrase.ids})
        self.size = sum(len(phrase.ids) for phrase in phrases)
        self.start: Progress = (Reading(self.size, _BETWEEN, 0, (1 << len(phrases)) - 1),)

    def remaining(self, progress: Progress) -> int:
        """Returns the fewest tokens that complete all phrases; one of ``tokens`` always reduces it by one."""
        return progress[0].remaining

    def moving(self, progress: Progress) -> list[tuple[int, bool]]:
        """Returns ``tokens``, each with True if its effect may differ from that of tokens in no phrase."""
        moves = set()
        for reading in progress:
            if reading.kind >= 0:
                moves.add(self._kinds[reading.kind].ids[reading.written])
            else:
                bits = zip(self._kinds, self._bits, strict=True)
                moves |= {kind.ids[0] for kind, alike in bits if reading.unmet & alike}
        return [(token, token in moves) for token in self.tokens]

    def missing(self, progress: Progress) -> dict[Phrase, int]:
        """Returns how often each phrase is missing, by the reading with the fewest remaining tokens."""
        kinds = zip(self._kinds, self._bits, strict=True)
        counts = {kind: (progress[0].unmet & alike).bit_count() for kind, alike in kinds}
        return {kind: count for kind, count in counts.items() if count}

    def after(self, progress: Progress, token: int) -> Progress:
        """Returns the progress after ``token``."""
        if token not in self._begun and all(reading.kind == _BETWEEN for reading in progress):
            return progress
        between, others = list[Reading](), list[Reading]()
        # In sorted order a reading comes after all readings that cover it.
        for reading in sorted({after for before in progress for after in self._read(before, token)}):
            kept = between if reading.kind == _BETWEEN else others
            if len(kept) < MOST_READINGS and not any(each.covers(reading) for each in (*between, *others)):
                kept.append(reading)
        return tuple(sorted(between + others))

    def _read(self, reading: Reading, token: int) -> Iterator[Reading]:
        """Returns the readings of a hypothesis after ``token``."""
        remaining, kind, written, unmet = reading
        if kind >= 0:
            if self._kinds[kind].ids[written] == token:
                yield self._written(reading)
            return
        joins = token == _JOINING or (token >= 0 and self._joins[token])
        if kind == _ENDED and joins:
            return
        yield Reading(remaining, _BETWEEN, 0, unmet)
        for begun in self._begun.get(token, ()):
            if alike := unmet & self._bits[begun]:
                left = unmet ^ (1 << (alike.bit_length() - 1))
                yield self._written(Reading(remaining, begun, 0, left))

    def _written(self, reading: Reading) -> Reading:
        """Returns ``reading`` with one more token of its phrase."""
        remaining, kind, written, unmet = reading
        phrase = self._kinds[kind]
        if written + 1 < len(phrase.ids):
            return Reading(remaining - 1, kind, written + 1, unmet)
        return Reading(remaining - 1, _ENDED if phrase.ends_word else _BETWEEN, 0, unmet)


def contains_all(text: str, phrases: Sequence[str]) -> bool:
    """Returns True if a text contains phrases at places of their own, none of them part of a longer word.

    As :class:`Phrases`, but over characters: a translation may have a phrase in other tokens than the search writes.
    """
    if not phrases:
        return True
    numbers: dict[tuple[str, bool], int] = {}
    of_text, *of_phrases = (
        [numbers.setdefault(sign, len(numbers)) for sign in _signs(each)] for each in (text, *phrases)
    )
    wanted = [
        Phrase(tuple(ids), is_of_word(phrase[-1])) for ids, phrase in zip(of_phrases, phrases, strict=True)
    ]
    automaton = Phrases(wanted, [joins for _, joins in numbers])
    progress = automaton.start
    for sign in of_text:
        progress = automaton.after(progress, sign)
    return automaton.remaining(progress) == 0


def _signs(text: str) -> list[tuple[str, bool]]:
    """Returns the characters of a text, each with True if it continues a word."""
    of_word = [False, *map(is_of_word, text)]
    return [(sign, before and now) for sign, before, now in zip(text, of_word, of_word[1:], strict=False)]


class Automata:
    """Automata of all sentences of a batch, as tables that advance many hypotheses at once.

    ``joins`` (V,) bool is True for tokens that continue a word.
    """

    def __init__(self, sentences: Sequence[Phrases], joins: Tensor) -> None:
        self._sentences, self._joins, self._flags = sentences, joins, joins.tolist()
        self._known: dict[tuple[int, Progress], int] = {}
        self._progress: list[tuple[int, Progress]] = []
        most = max(len(sentence.tokens) for sentence in sentences)
        tokens = [[*sentence.tokens, *[_OTHER] * (most - len(sentence.tokens))] for sentence in sentences]
        self.tokens = torch.tensor(tokens, dtype=torch.int64).view(len(sentences), most)
        self.sizes = torch.tensor([sentence.size for sentence in sentences])
        # The last two columns are the transitions of other tokens.
        self._next = np.zeros((64, most + 2), dtype=np.int64)
        self._remaining = np.zeros(64, dtype=np.int64)
        self._ready = np.zeros(64, dtype=bool)

    def start(self, prefixes: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Returns the states (B,) of empty hypotheses, and the tokens that each sentence needs after its prefix."""
        needed = []
        for sentence, prefix in zip(self._sentences, prefixes, strict=True):
            progress = sentence.start
            for token in prefix:
                progress = sentence.after(progress, token)
            needed.append(sentence.remaining(progress))
        numbers = [self._number(at, sentence.start) for at, sentence in enumerate(self._sentences)]
        states = torch.tensor(numbers, dtype=torch.int64)
        self.expand(states)
        return states, needed

    def remaining(self, states: Tensor) -> Tensor:
        """Returns the number of tokens that states still need, in their shape."""
        return torch.from_numpy(self._remaining)[states]

    def missing(self, state: int) -> tuple[int, dict[Phrase, int]]:
        """Returns the sentence of a state, and its missing phrases as :meth:`Phrases.missing`."""
        sentence, progress = self._progress[state]
        return sentence, self._sentences[sentence].missing(progress)

    def is_within(self, state: int) -> bool:
        """Returns True if the last token of a state is within a phrase."""
        return self._progress[state][1][0].kind >= 0

    def at_word_end(self, states: Tensor) -> Tensor:
        """Returns (R,) bool, True if a phrase is complete unless the next token continues its last word."""
        after = self.remaining(torch.from_numpy(self._next)[states][:, -2:])
        return after[:, 0] < after[:, 1]

    def offered(self, states: Tensor) -> Tensor:
        """Returns (R, M) bool, True for the tokens of ``tokens`` that advance ``states`` (R,)."""
        after = self.remaining(torch.from_numpy(self._next)[states][:, :-2])
        return after == self.remaining(states)[:, None] - 1

    def after(
        self, states: Tensor, sentences: Tensor, tokens: Tensor, ignored: Tensor | None = None
    ) -> Tensor:
        """Returns the states (R, W) after ``tokens`` (R, W) from ``states`` (R,) of ``sentences`` (R,).

        ``ignored`` (R, M) is True for the tokens of ``tokens`` that count like those of no phrase.
        """
        most = self.tokens.shape[1]
        columns = most + self._joins[tokens].long()
        for column in range(most):
            matches = self.tokens[sentences, column][:, None] == tokens
            if ignored is not None:
                matches &= ~ignored[:, column, None]
            columns = torch.where(matches, column, columns)
        return torch.from_numpy(self._next)[states].gather(1, columns)

    def expand(self, states: Tensor) -> None:
        """Computes the transitions of ``states`` (R,)."""
        for state in set(states.tolist()):
            if self._ready[state]:
                continue
            at, progress = self._progress[state]
            sentence = self._sentences[at]
            others = [self._number(at, sentence.after(progress, token)) for token in (_OTHER, _JOINING)]
            transitions = [
                self._number(at, sentence.after(progress, token)) if moves else others[self._flags[token]]
                for token, moves in sentence.moving(progress)
            ]
            transitions += [others[0]] * (self.tokens.shape[1] - len(transitions)) + others
            self._next[state] = transitions
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
    """Returns the continuations that enter the beam, best first: (B, beam) int64.

    The best of each bank come first, in descending order of banks; then the second of each, and so on. If there are
    fewer banks than hypotheses in the beam, each bank has its share, and unused shares go to the others.

    Args:
        totals: (B, N) log-probabilities, -inf if ruled out; fewer than ``beam`` may remain.
        banks: number of phrase tokens of each continuation, (B, N).
    """
    count = totals.shape[1]
    by_total = totals.argsort(dim=1, descending=True, stable=True)
    sorted_banks = banks.gather(1, by_total).masked_fill(totals.gather(1, by_total) == -torch.inf, -1)
    by_bank = sorted_banks.argsort(dim=1, descending=True, stable=True)
    order, sorted_banks = by_total.gather(1, by_bank), sorted_banks.gather(1, by_bank)
    # The rank within a bank is the position minus that of the bank's first continuation.
    at = torch.arange(count).expand_as(order)
    first = torch.ones_like(order, dtype=torch.bool)
    first[:, 1:] = sorted_banks[:, 1:] != sorted_banks[:, :-1]
    rank = at - torch.where(first, at, 0).cummax(dim=1).values
    rank = rank.masked_fill(sorted_banks < 0, count)
    chosen = rank.argsort(dim=1, stable=True)[:, :beam]
    return order.gather(1, chosen)
