"""Removes tags and placeholders from a line before translation and inserts them into the translation by alignment.

A pair of tags encloses words; in the translation it encloses the consecutive words that are aligned best with them:
a word aligned with enclosed words counts for them, a word aligned with others against. Tags inside another tag stay
inside it and neighbours do not overlap, so that nesting is kept. Each tag occurs once in the translation. Everything
else, as placeholders, is inserted before the words that follow it.

Punctuation at the ends of words is separate: ``<b>dog</b>.`` leaves the full stop outside.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from econmt.data.text.subwords import BLANKS

_TAG = re.compile(
    r"<!--.{0,1000}?-->"
    r"|<(?P<close>/?)(?P<name>[A-Za-z][\w:.-]*|\d+)"
    r"""(?:\s(?:[^<>"']|"[^"]{0,1000}"|'[^']{0,1000}')*?|\s[^<>]*?)?(?P<alone>/?)>"""
    r"|\$?\{\{?[\w.:-]*\}?\}"
    r"|%\(\w+\)[sdf]|%(?:\d+\$)?[sdf](?!\w)"
)
_ALONE = {"br", "hr", "img", "wbr"}
"""HTML elements without an end tag."""
_DEEPEST = 100
"""Maximum nesting depth of tags; deeper ones are treated as single."""
_WORD = re.compile("[^ ]+")
_BLANK = re.compile(f"[{BLANKS}]")
_LETTER = re.compile(r"\w")


class Unit(NamedTuple):
    """Letters of a word, or the punctuation before or after them.

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


class Marked(NamedTuple):
    """Line without its marks, and the marks as a tree.

    Attributes:
        line: the line with its marks. text: the line without them. units: units of the text.
        marks: top level of the tree. words: for each word of the text, the words of the line that it is part of.
    """

    line: str
    text: str
    units: list[Unit]
    marks: list[Mark]
    words: dict[int, list[int]]


def units(text: str) -> list[Unit]:
    """Returns the units of a text; words are separated by blanks."""
    parts: list[Unit] = []
    for number, match in enumerate(_WORD.finditer(text)):
        word, start = match[0], match.start()
        begin, end = _LETTER.search(word), _LETTER.search(word[::-1])
        first, last = begin.start() if begin else 0, len(word) - (end.start() if end else 0)
        for part in filter(None, (word[:first], word[first:last], word[last:])):
            parts.append(Unit(part, number, start, start > match.start()))
            start += len(part)
    return parts


class _TagMatch(NamedTuple):
    """Match in a line: its position in the text, and True if there is no blank before it, and after it."""

    match: re.Match[str]
    at: int
    glued: tuple[bool, bool]


def take_out(line: str) -> Marked:
    """Separates a line into its marks and the text to translate."""
    line = _BLANK.sub(" ", unicodedata.normalize("NFC", line))
    text, end, matches = "", 0, list[_TagMatch]()
    kept: list[int] = []
    """Position in the line of each character of the text."""
    for match in _TAG.finditer(line):
        text += line[end : match.start()]
        kept += range(end, match.start())
        before, behind = line[max(match.start() - 1, 0) : match.start()], line[match.end() : match.end() + 1]
        alone = not match["name"] or match["alone"] or match["name"].lower() in _ALONE
        if alone and text[-1:].isalnum() and behind.isalnum():
            text += " "
            kept.append(match.start())
        matches.append(_TagMatch(match, len(text), (before not in ("", " "), behind not in ("", " "))))
        end = match.end()
    if not matches:
        return Marked(line, line, [], [], {})
    text += line[end:]
    kept += range(end, len(line))
    numbers = list(accumulate((one == " " != other for one, other in pairwise(line.lstrip(" "))), initial=0))
    shift = len(line) - len(numbers)
    words = {
        number: sorted({numbers[at - shift] for at in kept[word.start() : word.end()]})
        for number, word in enumerate(_WORD.finditer(text))
    }
    text_units = units(text)
    return Marked(line, text.strip(), text_units, _tree(matches, text_units), words)


def _tree(matches: Sequence[_TagMatch], text_units: Sequence[Unit]) -> list[Mark]:
    """Returns marks as a tree; an opening without a closing tag, or the reverse, is single."""
    top: list[Mark] = []
    open_tags: list[tuple[str, Mark, list[Mark]]] = []
    level = top
    starts = [unit.start for unit in text_units]
    ends = [unit.start + len(unit.text) for unit in text_units]
    for match, at, glued in matches:
        # A mark that begins or ends inside a word encloses the whole word.
        first, last = bisect_right(ends, at), bisect_left(starts, at)
        names = [name for name, _, _ in open_tags]
        if match["close"] and match["name"] in names:
            while True:
                name, mark, outer = open_tags.pop()
                if name == match["name"]:
                    break
                outer.extend(mark.inner)  # never closed, so later marks are not inside it
                mark.inner = []
            mark.end, mark.last = match[0], last
            mark.glued = (*mark.glued[:2], *glued)
            level = outer
            continue
        mark = Mark(match[0], first, first, glued=(*glued, False, False))
        level.append(mark)
        if match["name"] and not match["close"] and not match["alone"] and len(open_tags) < _DEEPEST:
            open_tags.append((match["name"], mark, level))
            level = mark.inner
    while open_tags:
        _, mark, outer = open_tags.pop()
        outer.extend(mark.inner)
        mark.inner = []
    return top


def put_back(
    marked: Marked, translation: str, alignment: Sequence[tuple[int, int]]
) -> tuple[str, list[tuple[int, int]]]:
    """Inserts the marks of a line into its translation; returns it with its alignment to the line with marks.

    ``alignment`` has pairs of source and target word; see :func:`econmt.decoding.alignment.hard_alignment`.
    """
    if not marked.marks:
        return translation, list(alignment)
    target = units(translation)
    by_word: dict[int, list[int]] = {}
    for index, unit in enumerate(marked.units):
        by_word.setdefault(unit.word, []).append(index)
    words: dict[int, list[int]] = {}
    for source, made in alignment:
        words.setdefault(made, []).append(source)
    sources = [
        {
            index
            for word in words.get(unit.word, ())
            for index in by_word.get(word, ())
            if (unit.has_letters and marked.units[index].has_letters) or marked.units[index].text == unit.text
        }
        for unit in target
    ]
    pieces = list(_arranged(marked.marks, target, sources, 0, len(target)))
    text, last, new_words = "", 0, dict[int, set[int]]()
    for piece, glued, _, word in pieces:
        if text and not glued:
            text, last = f"{text} ", last + 1
        text += piece
        if word is not None:
            new_words.setdefault(word, set()).add(last)
        last += len(_WORD.findall(piece)) - 1
    renumbered = {
        (source, made)
        for seen, word in alignment  # vocabularies may define blanks differently
        for source in marked.words.get(seen, ())
        for made in new_words.get(word, ())
    }
    return text, sorted(renumbered, key=lambda pair: pair[::-1])


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
    spans = sorted(intervals.values())
    points: dict[int, list[int]] = {}
    for number, mark in enumerate(marks):
        if number not in intervals:
            link = bisect_left(links, (mark.first,))
            nearest = links[link][1] if link < len(links) else end
            before = bisect_left(spans, (nearest,)) - 1
            if before >= 0 and nearest < spans[before][1]:
                nearest = spans[before][0]
            points.setdefault(nearest, []).append(number)
    begins = {span[0]: number for number, span in intervals.items()}
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
                yield piece(mark.text, False, True)
                for each in _arranged(mark.inner, target, sources, at, at):
                    yield piece(*each)
                yield piece(mark.end, True, mark.glued[3])
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
