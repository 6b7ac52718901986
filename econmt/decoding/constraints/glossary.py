"""Glossaries: if a term occurs in the source, its translation in the glossary must occur in the target."""

from __future__ import annotations

from pathlib import Path

from econmt.data.text.corpus import read_lines, split_pair
from econmt.data.text.subwords import normalized, split_words
from econmt.decoding.constraints.phrases import units
from econmt.errors import InputError


class Glossary:
    """Source phrases and their translations, none of them blank.

    A term occurs where its whole words follow one another. A term without capitals matches regardless of case. Of
    overlapping terms the one that begins first is taken, and of these the longest.
    """

    def __init__(self, terms: dict[str, str]) -> None:
        self._terms: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}
        for source, target in terms.items():
            words = units(source)
            self._terms.setdefault(_folded(words), []).append((words, target))
        # Only lengths of existing terms are tried; else one long term would make every text slow.
        self._sizes = sorted({len(words) for words in self._terms}, reverse=True)
        for alike in self._terms.values():
            # Of two terms that differ in case, the one with capitals matches text with the same capitals.
            alike.sort(key=lambda term: _has_no_capitals(term[0]))

    def constraints(self, text: str) -> list[str]:
        """Returns the translations of all terms in a sentence, in order, each as often as its term occurs."""
        words = units(text)
        folded = _folded(words)
        targets, at = list[str](), 0
        while at < len(words):
            for size in self._sizes:
                if size > len(words) - at:
                    continue
                target = self._match(words[at : at + size], folded[at : at + size])
                if target is not None:
                    targets.append(target)
                    at += size
                    break
            else:
                at += 1
        return targets

    def targets(self) -> list[str]:
        """Returns the translations of all terms."""
        return [target for terms in self._terms.values() for _, target in terms]

    def _match(self, words: list[str], folded: tuple[str, ...]) -> str | None:
        for term, target in self._terms.get(folded, ()):
            if term == words or _has_no_capitals(term):
                return target
        return None


def _folded(words: list[str]) -> tuple[str, ...]:
    return tuple(word.casefold() for word in words)


def _has_no_capitals(words: list[str]) -> bool:
    return all(word == word.lower() for word in words)


def read_glossary(path: Path) -> Glossary:
    """Reads a glossary; each line has a source phrase, a tab and a target phrase. Blank lines are skipped.

    Raises:
        InputError: The file cannot be read, a line has not two columns or a blank side, or a term has two
            translations; the message names file and line.
    """
    terms: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        source, target = (normalized(side) for side in split_pair(line, path, number))
        if not units(source) or not target:
            raise InputError(
                f"{path}:{number}: the {'target' if units(source) else 'source'} phrase is blank"
            )
        if terms.setdefault(source, target) != target:
            raise InputError(
                f"{path}:{number}: {source!r} has another translation in line {lines[source]}; a term has one"
            )
        lines.setdefault(source, number)
    return Glossary(terms)


def read_avoid_list(path: Path) -> tuple[str, ...]:
    """Reads phrases that no translation may contain, one a line. Blank lines are skipped.

    Raises:
        InputError: The file cannot be read; the message names it.
    """
    phrases = (" ".join(split_words(line)) for line in read_lines(path))
    return tuple(dict.fromkeys(filter(None, phrases)))
