"""Insertion of tags and placeholders, which were removed from a sentence before translation, by alignment.

A pair of tags encloses words; in the translation it encloses the consecutive words that are aligned best with them:
a word aligned with enclosed words counts for them, a word aligned with others against. Tags inside another tag stay
inside it and neighbours do not overlap, so that nesting is kept. Each tag occurs once in the translation. Everything
else, as placeholders, is inserted before the words that follow it.

Punctuation at the ends of words is separate: ``<b>dog</b>.`` leaves the full stop outside.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, NamedTuple

_DEEPEST = 100
"""Maximum nesting depth of tags; deeper ones are treated as single."""
_FEW_SIGNS = 8
_WORD = re.compile("[^ ]+")
_LETTER = re.compile(r"\w")


class Unit(NamedTuple):
    """Letters of a word, or a sign of the punctuation before or after them.

    Attributes:
        text: its characters, never empty. word: index of its word.
        start: index of its first character in the text.
        glued: True if no blank precedes it.
    """

    text: str
    word: int
    start: int
    glued: bool

    @property
    def has_letters(self) -> bool:
        """True if it contains more than punctuation."""
        return _LETTER.search(self.text) is not None


@dataclass
class Mark:
    """A pair of tags, or a single tag or placeholder.

    Attributes:
        text, end: opening and closing text; ``end`` is empty if single.
        first, last: it encloses the source's units from ``first`` up to ``last``.
        glued: True if there is no blank: before ``text``, after it, before ``end``, after it.
        inner: marks inside.
    """

    text: str
    first: int = 0
    last: int = 0
    end: str = ""
    glued: tuple[bool, bool, bool, bool] = (False, False, False, False)
    inner: list[Mark] = field(default_factory=list)


class Tag(NamedTuple):
    """A tag or placeholder as it is written in a text.

    Attributes:
        text: its characters. name: name of its element; empty for placeholders and comments.
        kind: "open" and "close" if it may be one of a pair.
        glued: True if there is no blank: before it, after it.
        at: index in the text without tags of the character that follows it.
    """

    text: str
    name: str = ""
    kind: Literal["open", "close", "alone"] = "alone"
    glued: tuple[bool, bool] = (False, False)
    at: int = 0


class Marked(NamedTuple):
    """Sentence without its marks, and the marks as a tree.

    Attributes:
        text: the sentence without marks. units: units of the text; none if there are no marks.
        marks: top level of the tree.
        words: for each word of the text, the words of the line that it is part of.
        escaped: True if special characters of HTML are escaped in the translation.
    """

    text: str
    units: Sequence[Unit] = ()
    marks: Sequence[Mark] = ()
    words: Sequence[Sequence[int]] = ()
    escaped: bool = False


def marked(text: str, tags: Sequence[Tag], words: Sequence[Sequence[int]], *, escaped: bool) -> Marked:
    """Makes a sentence from its text without tags, in which blanks are single characters, and its tags in order."""
    if not tags:
        return Marked(" ".join(text.split()) if escaped else text, words=words, escaped=escaped)
    text_units = units(text)
    return Marked(" ".join(text.split()), text_units, _tree(tags, text_units), words, escaped)


def _signs(text: str) -> Sequence[str]:
    """Returns punctuation sign by sign, so that marks may stand in between; a long row of signs is one."""
    return text if len(text) <= _FEW_SIGNS else [text]


def units(text: str) -> list[Unit]:
    """Returns the units of a text; words are separated by blanks."""
    parts: list[Unit] = []
    for number, match in enumerate(_WORD.finditer(text)):
        word, start = match[0], match.start()
        begin, end = _LETTER.search(word), _LETTER.search(word[::-1])
        first, last = begin.start() if begin else 0, len(word) - (end.start() if end else 0)
        before, behind = word[:first], word[last:]
        pieces = [*_signs(before), word[first:last] if begin else "", *_signs(behind if begin else word)]
        for part in filter(None, pieces):
            parts.append(Unit(part, number, start, start > match.start()))
            start += len(part)
    return parts


def _tree(tags: Sequence[Tag], text_units: Sequence[Unit]) -> list[Mark]:
    """Returns marks as a tree; an opening without a closing tag, or the reverse, is single."""
    top: list[Mark] = []
    open_tags: list[tuple[str, Mark, list[Mark]]] = []
    level = top
    starts = [unit.start for unit in text_units]
    ends = [unit.start + len(unit.text) for unit in text_units]
    for tag in tags:
        # A mark that begins or ends inside a word encloses the whole word.
        first, last = bisect_right(ends, tag.at), bisect_left(starts, tag.at)
        if tag.kind == "close" and tag.name in (name for name, _, _ in open_tags):
            while True:
                name, mark, outer = open_tags.pop()
                if name == tag.name:
                    break
                outer.extend(mark.inner)  # never closed, so later marks are not inside it
                mark.inner = []
            mark.end, mark.last = tag.text, last
            mark.glued = (*mark.glued[:2], *tag.glued)
            level = outer
            continue
        mark = Mark(tag.text, first, first, glued=(*tag.glued, False, False))
        level.append(mark)
        if tag.kind == "open" and len(open_tags) < _DEEPEST:
            open_tags.append((tag.name, mark, level))
            level = mark.inner
    while open_tags:
        _, mark, outer = open_tags.pop()
        outer.extend(mark.inner)
        mark.inner = []
    return top


def _places(text_units: Sequence[Unit]) -> dict[int, dict[str, list[int]]]:
    """Returns for each word the indices of its units: of its letters, under an empty key, and of each sign."""
    places: dict[int, dict[str, list[int]]] = {}
    for index, unit in enumerate(text_units):
        kind = "" if unit.has_letters else unit.text
        places.setdefault(unit.word, {}).setdefault(kind, []).append(index)
    return places


def put_back(
    source: Marked, translation: str, alignment: Sequence[tuple[int, int]]
) -> tuple[str, list[tuple[int, int]]]:
    """Inserts the marks of a sentence into its translation; returns it with its alignment to the line with marks.

    ``alignment`` has pairs of source and target word; see :func:`econmt.decoding.alignment.hard_alignment`.
    """
    if not source.marks:
        pairs = [(word, made) for seen, made in alignment for word in _at(source.words, seen)]
        return escape(translation, quote=False) if source.escaped else translation, pairs
    target = units(translation)
    sources: list[set[int]] = [set() for _ in target]
    places, made_places = _places(source.units), _places(target)
    for seen, made in alignment:
        # Letters belong to letters, and each sign to the same one, in order.
        for kind, indices in made_places.get(made, {}).items():
            for at, index in zip(indices, places.get(seen, {}).get(kind, ()), strict=False):
                sources[at].add(index)
    pieces = list(_arranged(source.marks, target, sources, 0, len(target)))
    text, last, new_words = list[str](), 0, dict[int, set[int]]()
    for piece, glued, _, word in pieces:
        if text and not glued:
            text.append(" ")
            last += 1
        text.append(escape(piece, quote=False) if source.escaped and word is not None else piece)
        if word is not None:
            new_words.setdefault(word, set()).add(last)
        last += len(_WORD.findall(piece)) - 1
    renumbered = {
        (number, made)
        for seen, word in alignment  # vocabularies may define blanks differently
        for number in _at(source.words, seen)
        for made in new_words.get(word, ())
    }
    return "".join(text), sorted(renumbered, key=lambda pair: pair[::-1])


def _at(words: Sequence[Sequence[int]], number: int) -> Sequence[int]:
    """Returns the words of a line that a word is part of; none if the vocabulary defines words differently."""
    return words[number] if number < len(words) else ()


def _interval(
    mark: Mark, sources: Sequence[set[int]], links: Sequence[tuple[int, int]], taken: set[int]
) -> tuple[int, int] | None:
    """Returns the consecutive free target units that are aligned best with a mark's units; None if none is.

    ``links`` are the sorted pairs of aligned source and target units.
    """
    candidates = [at for _, at in links[bisect_left(links, (mark.first,)) : bisect_left(links, (mark.last,))]]
    if not candidates:
        return None
    best, interval = 0, None
    total = start = 0
    for at in range(min(candidates), max(candidates) + 1):
        if at in taken:
            total, start = 0, at + 1
            continue
        gain = 0
        if sources[at]:
            gain = 1 if any(mark.first <= index < mark.last for index in sources[at]) else -1
        if total <= 0 and gain > 0:
            total, start = 0, at
        total += gain
        if gain > 0 and total > best:
            best, interval = total, (start, at + 1)
    return interval


_Piece = tuple[str, bool, bool, int | None]
"""Text; True if no blank precedes it; True if no blank follows it; its word in the translation, None for a mark."""


def _arranged(
    marks: Sequence[Mark],
    target: Sequence[Unit],
    sources: Sequence[set[int]],
    begin: int,
    end: int,
) -> Iterator[_Piece]:
    """Yields the pieces of the target units from ``begin`` to ``end`` with the marks among them."""
    links = sorted((index, at) for at in range(begin, end) for index in sources[at]) if marks else []
    taken: set[int] = set()
    intervals: dict[int, tuple[int, int]] = {}
    for number, mark in enumerate(marks):
        interval = _interval(mark, sources, links, taken) if mark.end else None
        if interval is not None:
            intervals[number] = interval
            taken.update(range(*interval))
    begins = {interval[0]: number for number, interval in intervals.items()}
    starts = sorted(begins)
    points: dict[int, list[int]] = {}
    for number, mark in enumerate(marks):
        if number not in intervals:
            link = bisect_left(links, (mark.first,))
            nearest = links[link][1] if link < len(links) else end
            # Beside a pair around this place marks keep their order: an earlier one stays before it.
            while (before := bisect_right(starts, nearest) - 1) >= 0:
                owner = begins[starts[before]]
                if nearest >= intervals[owner][1]:
                    break
                if number < owner:
                    nearest = starts[before]
                    break
                nearest = intervals[owner][1]
            points.setdefault(nearest, []).append(number)
    stuck = False

    def piece(text: str, before: bool, behind: bool, word: int | None = None) -> _Piece:
        nonlocal stuck
        new = text, before or stuck, behind, word
        stuck = behind
        return new

    at = begin
    while at <= end:
        for number in points.get(at, ()):
            mark = marks[number]
            if mark.end:  # none of its words is in the translation, so it encloses nothing
                before = mark.glued[0] and at > begin
                parts_words = before and at < end and not target[at].glued
                yield piece(mark.text, before, True)
                for each in _arranged(mark.inner, target, sources, at, at):
                    yield piece(*each)
                yield piece(mark.end, True, mark.glued[3] and not parts_words)
            else:
                yield piece(mark.text, mark.glued[0] and at > begin, mark.glued[1])
        if at in begins:
            number = begins.pop(at)
            mark, last = marks[number], intervals[number][1]
            yield piece(mark.text, target[at].glued and at > begin, mark.glued[1])
            first = True
            for text, is_glued, glues, word in _arranged(mark.inner, target, sources, at, last):
                yield piece(text, is_glued and not first, glues, word)
                first = False
            yield piece(mark.end, mark.glued[2], False)
            at = last
            continue
        if at < end:
            yield piece(target[at].text, target[at].glued and at > begin, False, target[at].word)
        at += 1
