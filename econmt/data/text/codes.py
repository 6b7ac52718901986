"""Codes of subword-nmt (Sennrich et al., 2016): merges of byte-pair encoding that divide the words of tokenised text.

A word is its characters and a mark of its end; the pair with the earliest rule in the list is merged until none fits.
In files of version 0.2 the mark is a part of the last character, in those of version 0.1 a symbol of its own. With a
vocabulary, subwords that it lacks are divided again, as by ``--vocabulary`` of subword-nmt's apply-bpe.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from econmt.config import limits
from econmt.data.text.corpus import read_lines
from econmt.errors import InputError

_END = "</w>"
_SEPARATOR = "@@"
_VERSION = re.compile(r"#version:\s*([0-9.]+?)(?:\.0+)*")
_MAX_CACHED = 200_000
"""Words whose division is kept; the text of half a million pairs has fewer."""

Rule = tuple[str, str]


class MergeCodes:
    """Division of words by a list of merges.

    Args:
        rules: pairs to merge, the first ones first.
        version: 2 if the end of a word is a part of its last character, 1 if it is a symbol of its own.
        kept: subwords that are not divided again, as subword-nmt writes them, with ``@@`` unless they end a word; None:
            all.
    """

    def __init__(self, rules: Sequence[Rule], version: int = 2, kept: Collection[str] | None = None) -> None:
        self.rules, self.version = list(rules), version
        self.kept = None if kept is None else frozenset(kept)
        # Of equal rules the first one counts, and so does the first of several that make the same subword.
        backwards = reversed(list(enumerate(self.rules)))
        self._ranks: dict[Rule, int] = {rule: rank for rank, rule in backwards}
        self._parts = {left + right: (left, right) for left, right in self._ranks}
        self._cuts: dict[str, tuple[str, ...]] = {}

    def cut(self, word: str) -> tuple[str, ...]:
        """Divides a word into subwords."""
        known = self._cuts.get(word)
        if known is None:
            if len(self._cuts) >= _MAX_CACHED:
                self._cuts.clear()
            known = self._cuts[word] = tuple(self._divide(word))
        return known

    def _divide(self, word: str) -> list[str]:
        if len(word) < 2:
            return [word]
        symbols = [*word, _END] if self.version == 1 else [*word[:-1], word[-1] + _END]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self.rules)))
            if best not in self._ranks:
                break
            symbols = _merged(symbols, best)
        if symbols[-1] == _END:
            symbols.pop()
        else:
            symbols[-1] = symbols[-1].removesuffix(_END)
        if self.kept is None:
            return symbols
        last = len(symbols) - 1
        parts = [part for at, symbol in enumerate(symbols) for part in self._known_parts(symbol, at == last)]
        return [part for part in parts if part]  # in version 0.1 the end of a word is a symbol without text

    def _known_parts(self, symbol: str, ends: bool) -> Iterator[str]:
        """Yields the parts of a subword that the vocabulary has, or those that no rule divides."""
        assert self.kept is not None
        whole = symbol if ends else symbol + _SEPARATOR
        rule = self._parts.get(symbol + _END if ends else symbol)
        if whole in self.kept or rule is None:
            yield symbol
            return
        left, right = rule
        yield from self._known_parts(left, False)
        yield from self._known_parts(right.removesuffix(_END) if ends else right, ends)


def _merged(symbols: Sequence[str], pair: Rule) -> list[str]:
    """Returns the symbols with each occurrence of a pair as one."""
    merged: list[str] = []
    at = 0
    while at < len(symbols):
        found = tuple(symbols[at : at + 2]) == pair
        merged.append("".join(pair) if found else symbols[at])
        at += 2 if found else 1
    return merged


def read_codes(path: Path) -> tuple[list[Rule], int]:
    """Reads rules that subword-nmt's learn-bpe wrote, and the version of their format.

    Raises:
        InputError: the file has no rules, another version, or a line that is not two symbols.
    """
    rules, version = list[Rule](), 1
    for number, line in enumerate(read_lines(path), 1):
        if number == 1 and line.startswith("#version:"):
            match = _VERSION.fullmatch(line.strip())
            if match is None or match[1] not in ("0.1", "0.2"):
                raise InputError(
                    f"{path}:1: codes of an unknown format, '{line[:40]}'; econmt reads 0.1 and 0.2"
                )
            version = int(match[1][-1])
            continue
        parts = line.strip("\r\n ").split(" ")
        if len(parts) != 2 or not all(parts):
            raise InputError(
                f"{path}:{number}: expected two symbols with a space between them, found '{line[:40]}'; give the "
                "codes that subword-nmt learn-bpe wrote"
            )
        rules.append((parts[0], parts[1]))
    if not rules:
        raise InputError(f"{path}: has no merge; give the codes that subword-nmt learn-bpe wrote")
    return rules, version


def read_kept(path: Path, threshold: int) -> list[str]:
    """Reads the subwords of a vocabulary of subword-nmt's get-vocab that occur at least ``threshold`` times, sorted.

    Raises:
        InputError: a line is not a subword and a count, or no subword is frequent enough.
    """
    kept = set()
    for number, line in enumerate(read_lines(path), 1):
        subword, space, digits = line.strip("\r\n ").partition(" ")
        count = limits.natural(digits)
        if not subword or not space or count is None:
            raise InputError(f"{path}:{number}: expected a subword and its count, found '{line[:40]}'")
        if count >= threshold:
            kept.add(subword)
    if not kept:
        raise InputError(f"{path}: has no subword with a count of at least {threshold}")
    return sorted(kept)
