"""Insertion of tags and placeholders, which were removed from a sentence before translation, by alignment.

A pair of tags encloses words; in the translation it encloses the consecutive words that are aligned best with them:
a word aligned with enclosed words counts for them, a word aligned with others against. Tags inside another tag stay
inside it and neighbours do not overlap, so that nesting is kept. Each tag occurs once in the translation. Everything
else, as placeholders, is inserted before the words that follow it; between it and a word is a blank unless the source
has a letter or digit right beside it.

Punctuation at the ends of words is separate: ``<b>dog</b>.`` leaves the full stop outside. Tags inside a word, as in
``H<sub>2</sub>O``, stay there if the translation has the same word, and enclose the whole of another word.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise, product
from typing import Literal, NamedTuple

MARKUP = "\0"
"""Stand-in for a mark beside another, see :class:`Tag`; no text has this character."""
_DEEPEST = 100
"""Maximum nesting depth of tags; deeper ones are treated as single."""
_FEW_SIGNS = 8
_WORD = re.compile("[^ ]+")
_LETTER = re.compile(r"\w")


class Unit(NamedTuple):
    """Letters of a word or, where tags part them, some of them; or a sign of the punctuation before or after them.

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
        beside: the characters, see :class:`Tag`, before ``text``, after it, before ``end``, after it.
        inner: marks inside.
    """

    text: str
    first: int = 0
    last: int = 0
    end: str = ""
    beside: tuple[str, str, str, str] = ("", "", "", "")
    inner: list[Mark] = field(default_factory=list)

    @property
    def shows(self) -> bool:
        """True unless it is a pair without placeholders inside, which without words is nothing that a reader sees."""
        return not self.end or any(mark.shows for mark in self.inner)


class Tag(NamedTuple):
    """A tag or placeholder as it is written in a text.

    Attributes:
        text: its characters. name: name of its element; empty for placeholders and comments.
        kind: "open" and "close" if it may be one of a pair.
        beside: the characters before and after it, ``MARKUP`` for another tag; empty for a blank and at an end.
        at: index in the text without tags of the character that follows it.
    """

    text: str
    name: str = ""
    kind: Literal["open", "close", "alone"] = "alone"
    beside: tuple[str, str] = ("", "")
    at: int = 0


class Marked(NamedTuple):
    """Sentence without its marks, and the marks as a tree.

    Attributes:
        text: the sentence without marks. units: units of the text; none if there are no marks.
        marks: top level of the tree.
        words: for each word of the text, the words of the line that it is part of.
        escaped: True if special characters of HTML are escaped in the translation.
        beside: its first and last character, if a mark outside of it touches them.
        parts: parts of the letters of words, by these letters, see :class:`Unit`.
    """

    text: str
    units: Sequence[Unit] = ()
    marks: Sequence[Mark] = ()
    words: Sequence[Sequence[int]] = ()
    escaped: bool = False
    beside: tuple[str, str] = ("", "")
    parts: Mapping[str, Sequence[str]] = {}


def marked(
    text: str,
    tags: Sequence[Tag],
    words: Sequence[Sequence[int]],
    *,
    escaped: bool,
    beside: tuple[str, str] = ("", ""),
) -> Marked:
    """Makes a sentence from its text without tags, in which blanks are single characters, and its tags in order."""
    if not tags:
        shown = " ".join(text.split()) if escaped else text
        return Marked(shown, words=words, escaped=escaped, beside=beside)
    at = sorted({tag.at for tag in tags if tag.kind != "alone"})
    cuts: dict[str, set[int]] = {}
    for whole in units(text, {}):
        inside = at[bisect_right(at, whole.start) : bisect_left(at, whole.start + len(whole.text))]
        cuts.setdefault(whole.text, set()).update(each - whole.start for each in inside)
    parts = {
        word: [word[a:b] for a, b in pairwise([0, *sorted(each), len(word)])]
        for word, each in cuts.items()
        if each
    }
    text_units = units(text, parts)
    return Marked(" ".join(text.split()), text_units, _tree(tags, text_units), words, escaped, beside, parts)


def _signs(text: str) -> Sequence[str]:
    """Returns punctuation sign by sign, so that marks may stand in between; a long row of signs is one."""
    return text if len(text) <= _FEW_SIGNS else [text]


def units(text: str, known: Mapping[str, Sequence[str]]) -> list[Unit]:
    """Returns the units of a text, whose words are separated by blanks; ``known`` are parts, see :class:`Marked`."""
    parts: list[Unit] = []
    for number, match in enumerate(_WORD.finditer(text)):
        word, start = match[0], match.start()
        begin, end = _LETTER.search(word), _LETTER.search(word[::-1])
        first, last = begin.start() if begin else 0, len(word) - (end.start() if end else 0)
        before, behind = word[:first], word[last:]
        letters = word[first:last] if begin else ""
        pieces = [*_signs(before), *known.get(letters, [letters]), *_signs(behind if begin else word)]
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
            mark.beside = (*mark.beside[:2], *tag.beside)
            level = outer
            continue
        before, behind = tag.beside
        if tag.kind == "alone" and before != MARKUP and first < len(starts) and starts[first] < tag.at:
            before = ""  # it moves to the beginning of its word
        mark = Mark(tag.text, first, first, beside=(before, behind, "", ""))
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

    ``alignment`` has pairs of source and target word; see :func:`econmt.decoding.results.hard_alignment`.
    """
    text, pairs = _put_inside(source, translation, alignment)
    before, behind = (
        " " if own and end and not _clings(own, end) else ""
        for own, end in zip(source.beside, (translation[:1], translation[-1:]), strict=True)
    )
    return f"{before}{text}{behind}", pairs


def _put_inside(
    source: Marked, translation: str, alignment: Sequence[tuple[int, int]]
) -> tuple[str, list[tuple[int, int]]]:
    if not source.marks:
        pairs = [(word, made) for seen, made in alignment for word in _at(source.words, seen)]
        return escape(translation, quote=False) if source.escaped else translation, pairs
    target = units(translation, source.parts)
    sources: list[set[int]] = [set() for _ in target]
    places, made_places = _places(source.units), _places(target)
    for seen, made in alignment:
        # Letters belong to letters, and each sign to the same one, in order.
        for kind, indices in made_places.get(made, {}).items():
            others = places.get(seen, {}).get(kind, ())
            is_other_word = kind == "" and len(indices) != len(others)
            for at, index in (product if is_other_word else zip)(indices, others):
                sources[at].add(index)
    text, last, new_words = list[str](), 0, dict[int, set[int]]()
    for piece, glued, word in _arranged(source.marks, target, sources, 0, len(target)):
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


_Piece = tuple[str, bool, int | None]
"""Text; True if no blank precedes it; its word in the translation, None for a mark."""


def _clings(beside: str, neighbour: str) -> bool:
    """Returns True if no blank parts a mark and its neighbour in the translation.

    Args:
        beside: the character that the source has there, see :class:`Tag`. neighbour: the translation's.
    """
    if not beside or not neighbour or MARKUP in (beside, neighbour):
        return beside == neighbour != ""
    return beside.isalnum() or beside == neighbour or (_opens(beside) and _opens(neighbour))


def _opens(sign: str) -> bool:
    return unicodedata.category(sign) in ("Ps", "Pi")


def _arranged(
    marks: Sequence[Mark], target: Sequence[Unit], sources: Sequence[set[int]], begin: int, end: int
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
    # The last character, MARKUP after a mark; and what the source has behind the last piece if that is a single mark.
    last = ""
    behind: str | None = None

    def follows(unit: Unit, first: str) -> bool:
        """Returns True if no blank precedes a unit, which begins with ``first``, or with a tag."""
        if behind is None:
            return unit.glued and last != ""
        return _clings(behind, first) or (unit.glued and not unit.has_letters)

    at = begin
    while at <= end:
        for number in points.get(at, ()):
            mark = marks[number]
            glued = _clings(mark.beside[0], last) or _clings(behind or "", MARKUP)
            glued = glued or ("" not in (mark.beside[0], last) and not mark.shows)
            yield mark.text, glued, None
            last, behind = MARKUP, mark.beside[1]
            if mark.end:  # none of its words is in the translation, so it encloses nothing
                for inner, (text, is_glued, word) in enumerate(
                    _arranged(mark.inner, target, sources, at, at)
                ):
                    yield text, is_glued or inner == 0, word
                yield mark.end, True, None
                parts_words = glued and at < end and not target[at].glued
                behind = "" if parts_words else mark.beside[3]
        if at in begins:
            number = begins.pop(at)
            mark, until = marks[number], intervals[number][1]
            yield mark.text, follows(target[at], MARKUP), None
            for inner, (text, is_glued, word) in enumerate(_arranged(mark.inner, target, sources, at, until)):
                yield text, is_glued or (inner == 0 and mark.beside[1] != ""), word
            yield mark.end, mark.beside[2] != "", None
            last, behind, at = MARKUP, None, until
            continue
        if at < end:
            unit = target[at]
            yield unit.text, follows(unit, unit.text[0]), unit.word
            last, behind = unit.text[-1], None
        at += 1
