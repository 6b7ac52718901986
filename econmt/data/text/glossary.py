"""Glossaries: terms of the source language, each with the translation that it must have.

A glossary is a text with a term a line. Term and translation are separated by a tab, an equals sign or a comma; the
first of these three that the line has counts, so that a term before a tab may contain the others. A line that begins
with a quotation mark and has no tab is CSV. Blank lines and lines that begin with ``#`` are skipped. Command line,
server and page read the same format.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from econmt.config.yaml_reader import shortened
from econmt.data.text.case import folded, lower
from econmt.data.text.corpus import read_lines
from econmt.data.text.vocabulary import normalized
from econmt.errors import InputError

SPACELESS = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
"""Letters of scripts without spaces between words, as in a character class of a regular expression."""

_UNIT = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+|\S")


def units(text: str) -> list[str]:
    """Returns the words and signs of raw text; in scripts without spaces each letter is a unit."""
    return _UNIT.findall(normalized(text))


def unit_spans(text: str) -> list[tuple[int, int]]:
    """Returns the spans of :func:`units` in a normalised text."""
    return [match.span() for match in _UNIT.finditer(text)]


class Occurrence(NamedTuple):
    """A term in a normalised sentence: its translation, and the characters from ``start`` to ``end`` that it covers."""

    target: str
    start: int
    end: int


class Glossary:
    """Source phrases and their translations, none of them blank.

    A term occurs where its whole words follow one another. A term without capitals matches regardless of case. Of
    overlapping terms the one that begins first is taken, and of these the longest.

    Args:
        terms: the phrases and their translations; also an attribute. locations: file and line of each, for messages.
    """

    def __init__(self, terms: Mapping[str, str], locations: Mapping[str, str] | None = None) -> None:
        sides = (*terms, *terms.values()) if isinstance(terms, Mapping) else (None,)
        if not all(isinstance(each, str) and normalized(each) for each in sides):
            raise InputError("a glossary expects terms with their translations, as {'dog': 'Hund'}")
        self.terms, self._locations = terms, locations or {}
        self._indices: dict[str, _Index] = {}

    @classmethod
    def checked(cls, terms: Mapping[str, str], where: str) -> Glossary:
        """Makes a glossary of terms as somebody has written them, with any blanks.

        Args:
            terms: the phrases and their translations. where: name of the glossary in messages.

        Raises:
            InputError: if a term or its translation is blank.
        """
        named = ((term, f"{where}: {shortened(term)!r}") for term in terms)
        return cls(dict(_checked_term(term, terms[term], name) for term, name in named))

    def name_of(self, source: str) -> str:
        """Returns the name of a term in messages, with its file and line if it has them."""
        return f"{self._locations.get(source, 'glossary')}: {shortened(source)} = {shortened(self.terms[source])}"

    def occurrences(self, text: str, language: str = "") -> list[Occurrence]:
        """Returns all terms in a sentence, in order; ``language``, a code, says which letters differ in case only."""
        if language not in self._indices:
            self._indices[language] = _Index(self.terms, language)
        return self._indices[language].occurrences(text)


class _Index:
    """Terms of a glossary by their words, for texts of one language."""

    def __init__(self, terms: Mapping[str, str], language: str) -> None:
        self._language = language
        self._terms: dict[tuple[str, ...], list[tuple[list[str], str]]] = {}
        for source, target in terms.items():
            words = units(source)
            self._terms.setdefault(self._folded(words), []).append((words, target))
        # Only lengths of existing terms are tried; else one long term would make every text slow.
        self._sizes = sorted({len(words) for words in self._terms}, reverse=True)
        for alike in self._terms.values():
            # Of two terms that differ in case, the one with capitals matches text with the same capitals.
            alike.sort(key=lambda term: self._has_no_capitals(term[0]))

    def occurrences(self, text: str) -> list[Occurrence]:
        """Returns all terms in a sentence, in order."""
        matches = list(_UNIT.finditer(normalized(text)))
        words = [match[0] for match in matches]
        in_one_case = self._folded(words)
        found, at = list[Occurrence](), 0
        while at < len(words):
            for size in self._sizes:
                if size > len(words) - at:
                    continue
                target = self._match(words[at : at + size], in_one_case[at : at + size])
                if target is not None:
                    found.append(Occurrence(target, matches[at].start(), matches[at + size - 1].end()))
                    at += size
                    break
            else:
                at += 1
        return found

    def _match(self, words: list[str], in_one_case: tuple[str, ...]) -> str | None:
        for term, target in self._terms.get(in_one_case, ()):
            if term == words or self._has_no_capitals(term):
                return target
        return None

    def _folded(self, words: list[str]) -> tuple[str, ...]:
        return tuple(folded(word, self._language) for word in words)

    def _has_no_capitals(self, words: list[str]) -> bool:
        return all(word == lower(word, self._language) for word in words)


def occurrences(text: str, glossaries: Iterable[Glossary], language: str = "") -> list[Occurrence]:
    """Returns the terms of several glossaries in a sentence, in order; an earlier glossary has priority."""
    found: list[Occurrence] = []
    for glossary in glossaries:
        found += [
            each
            for each in glossary.occurrences(text, language)
            if all(each.end <= other.start or other.end <= each.start for other in found)
        ]
    return sorted(found, key=lambda each: each.start)


def read_glossary(path: Path) -> Glossary:
    """Reads a glossary from a file; raises InputError, with file and line, as :func:`parse_glossary` does."""
    return parse_glossary(read_lines(path), str(path))


def parse_glossary(lines: Iterable[str], where: str) -> Glossary:
    """Makes a glossary of lines, each a term and its translation with a tab, an equals sign or a comma between them.

    Args:
        lines: the lines; blank ones and those that begin with ``#`` are skipped. where: their name in messages.

    Raises:
        InputError: if a line has not two columns or a blank side, or a term has two translations; the message names
            ``where`` and the line.
    """
    terms: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = normalized(line)
        if not text or text.startswith("#"):
            continue
        source, target = _columns(line, text, f"{where}:{number}")
        if terms.setdefault(source, target) != target:
            raise InputError(
                f"{where}:{number}: {source!r} has another translation in line {numbers[source]}; a term has one"
            )
        numbers.setdefault(source, number)
    return Glossary(terms, {source: f"{where}:{number}" for source, number in numbers.items()})


def _checked_term(source: str, target: str, where: str) -> tuple[str, str]:
    """Returns a term and its translation, normalised; raises InputError, which names ``where``, if one is blank."""
    if not units(source) or not normalized(target):
        blank = "translation" if units(source) else "term"
        raise InputError(f"{where}: the {blank} is blank; give both sides, as dog = Hund")
    return normalized(source), normalized(target)


def _columns(line: str, text: str, where: str) -> tuple[str, str]:
    """Splits a line, and its normalised ``text``, into a term and its translation."""
    if "\t" in line:
        columns = line.split("\t")
    elif text.startswith('"') or ("=" not in text and "," in text):
        try:
            columns = next(csv.reader([text], strict=True, skipinitialspace=True))
        except csv.Error as error:
            raise InputError(
                f"{where}: no CSV that can be read ({error}); write a quotation mark within quotes twice"
            ) from None
    else:
        columns = text.split("=", 1)
    if len(columns) != 2:
        count = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
        raise InputError(
            f"{where}: {count} in {shortened(text)!r}; expected a term and its translation with a tab, = or a comma "
            "between them"
        )
    return _checked_term(columns[0], columns[1], where)
