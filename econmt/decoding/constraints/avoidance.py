"""Avoided phrases: no translation may contain them, whatever its segmentation into tokens.

A translation contains an avoided phrase if it has its characters, and neither the first nor the last word of the phrase
is part of a longer word: "dog" avoids "dog" and "(dog)", not "dogs". When the last token of a phrase is written it is
unknown whether the word continues, so tokens that would complete the phrase are ruled out one step later;
:attr:`Moves.risky` tells a search which tokens lead there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import ChainMap
from collections.abc import Iterable, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.text.vocabulary import SPECIAL_TOKENS, UNK, WORD_START, split_words
from econmt.decoding.constraints.phrases import Spelling, is_of_word


class Reached(NamedTuple):
    """State after the last tokens: avoided phrases in progress.

    Attributes:
        begun: pairs of an avoided phrase's index and its number of characters written so far.
        in_word: True if the last character belongs to a word.
    """

    begun: frozenset[tuple[int, int]]
    in_word: bool


START = Reached(frozenset(), False)

Progress = dict[int, set[tuple[int, int]]]
"""By token, pairs of a phrase's index and its number of characters written after the token; one more than its length if
the phrase is complete whatever follows."""


class Moves(NamedTuple):
    """Consequences of the possible next tokens.

    Attributes:
        after: states after the tokens that begin or continue a phrase.
        masked: (N,) tokens that would complete a phrase.
        risky: (N,) tokens that complete a phrase unless its last word continues.
        only_joining: True if a phrase is complete unless the next token continues its last word.
    """

    after: MutableMapping[int, Reached]
    masked: Tensor
    risky: Tensor
    only_joining: bool


class Avoidance:
    """Automaton over tokens of the avoided phrases of a sentence; its states are made when they are reached.

    In a phrase, ``<unk>`` also stands for the token of unknown words.
    """

    def __init__(self, phrases: Iterable[str], spelling: Spelling) -> None:
        self._spelling = spelling
        self._phrases = [WORD_START.join(split_words(phrase)) for phrase in phrases]
        self._known: dict[Reached, Moves] = {}
        # Tokens that begin a phrase, after a character of a word and after any other.
        self._first: dict[bool, dict[int, set[tuple[int, int]]]] = {}
        for in_word in (False, True):
            reached = self._first[in_word] = {}
            for number, phrase in enumerate(self._phrases):
                self._begin(reached, number, phrase, in_word)

    def after(self, reached: Reached, token: int) -> Reached:
        """Returns the state after a token."""
        piece = self._spelling.pieces[token]
        known = self.moves(reached).after.get(token)
        return known or Reached(frozenset(), piece != "" and is_of_word(piece[-1]))

    def is_in(self, ids: Iterable[int], *, goes_on: bool = False) -> bool:
        """Returns True if the ids contain an avoided phrase; with ``goes_on`` their last word may continue."""
        reached = START
        for token in ids:
            moves = self.moves(reached)
            if token in moves.masked or (moves.only_joining and not self._spelling.joins[token]):
                return True
            reached = self.after(reached, token)
        return self.moves(reached).only_joining and not goes_on

    def moves(self, reached: Reached) -> Moves:
        """Returns the consequences of the next tokens after ``reached``."""
        if reached not in self._known:
            first = self._first[reached.in_word]
            if not reached.begun:
                self._known[reached] = self._moves(first, reached)
                return self._known[reached]
            progress: Progress = {}
            for number, position in reached.begun:
                self._go_on(progress, number, position)
            for token, positions in progress.items():
                positions |= first.get(token, set())
            # Tokens that begin a phrase may be many, and are shared by all states.
            begin, go_on = self.moves(Reached(frozenset(), reached.in_word)), self._moves(progress, reached)
            self._known[reached] = Moves(
                ChainMap(go_on.after, begin.after),
                torch.cat([begin.masked, go_on.masked]),
                torch.cat([begin.risky, go_on.risky]),
                go_on.only_joining,
            )
        return self._known[reached]

    def _moves(self, progress: Progress, reached: Reached) -> Moves:
        """Derives the consequences from the progress that each token makes."""
        after, masked, risky = {}, list[int](), list[int]()
        for token, positions in progress.items():
            sizes = [(position, len(self._phrases[number])) for number, position in positions]
            if any(position > size for position, size in sizes):
                masked.append(token)
                continue
            after[token] = Reached(frozenset(positions), is_of_word(self._spelling.pieces[token][-1]))
            if any(position == size for position, size in sizes):
                risky.append(token)
        complete = any(position == len(self._phrases[number]) for number, position in reached.begun)
        return Moves(
            after, torch.tensor(masked, dtype=torch.int64), torch.tensor(risky, dtype=torch.int64), complete
        )

    def _begin(self, progress: Progress, number: int, phrase: str, in_word: bool) -> None:
        """Adds the tokens that begin a phrase."""
        keys = {phrase[:2], phrase[:1]}
        if len(phrase) < 2:
            keys = {key for key in self._spelling.tails if key[0] == phrase}
        if phrase == SPECIAL_TOKENS[UNK]:
            progress.setdefault(UNK, set()).add((number, len(phrase) + 1))
        for key in keys:
            for token, offset in self._spelling.tails.get(key, ()):
                before = is_of_word(self._spelling.pieces[token][offset - 1]) if offset else in_word
                if not (before and is_of_word(phrase[0])):
                    self._reach(progress, number, 0, token, offset)

    def _go_on(self, progress: Progress, number: int, position: int) -> None:
        """Adds the tokens that continue a phrase of which ``position`` characters are written."""
        rest = self._phrases[number][position:]
        if not rest:
            return
        for end in range(1, len(rest)):
            token = self._spelling.ids.get(rest[:end])
            if token is not None:
                self._reach(progress, number, position, token, 0)
        pieces = self._spelling.in_order
        for piece, token in pieces[bisect_left(pieces, (rest, -1)) :]:
            if not piece.startswith(rest):
                break
            self._reach(progress, number, position, token, 0)

    def _reach(self, progress: Progress, number: int, position: int, token: int, offset: int) -> None:
        """Adds the progress of a phrase by the characters of a token from ``offset`` on, if they match."""
        rest, written = self._phrases[number][position:], self._spelling.pieces[token][offset:]
        end = position + len(written)
        if written.startswith(rest):
            follows = written[len(rest) : len(rest) + 1]
            splits = is_of_word(rest[-1])
            if follows and splits and is_of_word(follows):
                return
            # One past the end: complete whatever follows, because the word ends here or another character follows.
            end = len(self._phrases[number]) + (1 if follows or not splits or self._spelling.words else 0)
        elif not rest.startswith(written):
            return
        progress.setdefault(token, set()).add((number, end))
