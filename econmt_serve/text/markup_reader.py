"""Reading of HTML pages, and of lines with tags and placeholders, as passages.

Block tags and ``<br>`` end a paragraph. Inline tags stay in their sentences and find their words again by alignment,
see :mod:`econmt_serve.text.markup`. Text of scripts, styles and code, and of elements with ``translate="no"``, is kept
as it is. Markup comes back exactly as it is written, which the parser of Python's library cannot do.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from html import unescape
from typing import Literal, NamedTuple

from econmt_serve.text.markup import MARKUP, Tag
from econmt_serve.text.passages import Passage, PassageBuilder, TextDivision

_BLOCKS_NAMES = """
address article aside audio base blockquote body br button canvas caption center col colgroup dd details dialog
dir div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html
iframe legend li link main menu meta nav noframes noscript object ol optgroup option p param pre script search
section select source style summary table tbody td template textarea tfoot th thead title tr track ul video
"""
_BLOCKS = frozenset(_BLOCKS_NAMES.split())
"""Elements that end a paragraph where they begin and end."""
_KEPT = frozenset(["code", "kbd", "math", "pre", "samp", "script", "style", "svg", "textarea", "var"])
"""Elements whose text is kept."""
_IN_NOTE = r"<(?!/a>|/sup>)[^<>]{0,300}>|[^\w<>]|\w(?![^\W\d_])"
_NOTE = re.compile(rf"(?=<(?:a|sup)[\s>])(?:{_IN_NOTE}){{1,60}}</(?:a></sup|sup></a)>", re.IGNORECASE)
"""Rest of a note's raised number or letter with its link, after the outer one of the two tags; it is kept."""
_RAW = frozenset(("script", "style", "textarea"))
"""Elements whose text contains no tags."""
_EMPTY = frozenset(["area", "embed", "img", "input", "wbr"])
"""Inline elements without an end tag."""
_UNSEEN = re.compile(r"<(?:wbr[\s/>]|!--)", re.IGNORECASE)
"""Beginning of markup that shows nothing, so that the characters beside it are of one word."""
_TAG = re.compile(r"""<(/?)([a-zA-Z][^\s/<>"']*)(?=[\s/>])[^<>"']*""")
"""Beginning of a tag with its name, up to the first quoted value, in which a bracket does not end it."""
_UNQUOTED = re.compile(r"""[^<>"']*""")
_BROKEN_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/<>]*)(?=[\s/>])[^<>]*>")
"""A tag with a quote that is never closed."""
_TAG_NAME = re.compile(r"<(/?)([a-zA-Z][^\s/<>]*)(?=[\s/>])")
_OTHERS = {"<!--": "-->", "<![CDATA[": "]]>", "<!": ">", "<?": ">", "</": ">"}
"""Ends of other markup by its beginning; the first beginning that matches applies."""
_UNTRANSLATED = re.compile(r"""\stranslate\s*=\s*["']?no\b""", re.IGNORECASE)
_LONG_REFERENCE = re.compile(r"&#[0-9]{20,};?")
"""A character reference with too many digits for any character; Python refuses to read thousands of digits."""
_NUMBER = r"[-+0#]*\d*(?:\.\d+)?(?:hh?|ll?|z)?[sdfiux@]"
"""End of a placeholder as in ``printf``, from its width on."""
_PLACEHOLDER = re.compile(
    rf"</?\d+\s*/?>|\$?\{{(?:[\w.:-]*|\{{ ?[\w.:-]* ?\}})\}}|%\(\w+\){_NUMBER}|%(?:\d+\$)?{_NUMBER}(?!\w)"
)


class _Markup(NamedTuple):
    """Markup of a page from ``start`` to ``end``; ``kind`` is "block" where it ends a paragraph."""

    start: int
    end: int
    kind: Literal["open", "close", "alone", "block"]
    name: str = ""


def html_passage(page: str, how: TextDivision) -> Passage:
    """Divides an HTML page into sentences; tags, comments and untranslated elements stay in order."""
    return _passage(page, how, html=True)


def line_passage(line: str, how: TextDivision) -> Passage:
    """Divides a line with tags and placeholders such as ``{name}`` and ``%s``; the rest is text."""
    return _passage(line, how, html=False)


def _passage(text: str, how: TextDivision, *, html: bool) -> Passage:
    builder = PassageBuilder(how, html=html)
    meaning = _meaning if html else str
    found = list(_MarkupFinder(text, placeholders=not html).markup())
    inline = [markup for markup in found if markup.kind != "block"]
    begins, ends = {markup.start for markup in inline}, {markup.end for markup in inline}
    done = 0
    for start, end, kind, name in found:
        builder.text(text[done:start], meaning)
        written, before, behind = text[start:end], text[max(start - 1, 0) : start], text[end : end + 1]
        if kind == "block":
            builder.separator(written)
        else:
            beside = MARKUP if start in ends else before.strip(), MARKUP if end in begins else behind.strip()
            parts = kind == "alone" and before.isalnum() and behind.isalnum() and not _UNSEEN.match(written)
            builder.tag(Tag(written, name, kind, beside), parts_words=parts)
        done = end
    builder.text(text[done:], meaning)
    return builder.passage()


def _meaning(raw: str) -> str:
    """Returns the text of a page's characters and references without soft hyphens, which models take for letters."""
    return unescape(_LONG_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", raw)).replace("\N{SOFT HYPHEN}", "")


class _NamedTag(NamedTuple):
    """Tag from ``start`` to ``end``, whatever is quoted in it."""

    start: int
    end: int
    closes: bool


class _MarkupFinder:
    """Finder of the markup in a text, in time proportional to its length."""

    def __init__(self, text: str, *, placeholders: bool) -> None:
        self._text, self._placeholders = text, placeholders
        self._absent: set[str] = set()
        self._unbalanced: set[str] = set()
        self._unfinished: set[int] = set()
        self._last: dict[str, int] = {}
        self._tags: dict[str, list[_NamedTag]] | None = None

    def markup(self) -> Iterator[_Markup]:
        """Yields the markup in order."""
        starts = re.compile(r"[<{$%]" if self._placeholders else "<")
        at = 0
        while match := starts.search(self._text, at):
            at = match.start()
            markup = self._markup_at(at)
            if markup is not None:
                yield markup
            at = at + 1 if markup is None else markup.end

    def _markup_at(self, at: int) -> _Markup | None:
        text = self._text
        if self._placeholders and (match := _PLACEHOLDER.match(text, at)):
            return _numbered(match)
        tag = _TAG.match(text, at)
        end = None if tag is None else self._end_of_tag(tag.end())
        if tag is None or end is None:
            tag = _BROKEN_TAG.match(text, at)
            end = self._end_of_other(at) if tag is None else tag.end()
        if tag is None or end is None:
            return None if end is None else _Markup(at, end, "alone")
        name, written = tag[2].lower(), text[at:end]
        kind: Literal["open", "close", "alone"] = "close" if tag[1] else "open"
        if written.endswith("/>") or name in _EMPTY:
            kind = "alone"
        if kind == "open" and (name in _KEPT or _UNTRANSLATED.search(written)):
            kept = self._end_of_element(name, end)
            if kept is not None:
                end, kind = kept, "alone"
        if kind == "open" and name in ("a", "sup") and (note := _NOTE.match(text, end)):
            end, kind = note.end(), "alone"
        return _Markup(at, end, "block" if name in _BLOCKS else kind, name if kind != "alone" else "")

    def _end_of_tag(self, at: int) -> int | None:
        """Returns the end of a tag that goes on with a quoted value or a bracket; None if it never ends."""
        begins: list[int] = []
        while at not in self._unfinished:
            begins.append(at)
            quote = self._text[at : at + 1]
            if quote == ">":
                return at + 1
            closing = -1 if quote not in ("'", '"') else self._find(quote, at + 1)
            if closing < 0:
                break
            match = _UNQUOTED.match(self._text, closing + 1)
            assert match is not None
            at = match.end()
        self._unfinished.update(begins)
        return None

    def _find(self, sign: str, at: int) -> int:
        """Returns the index of the next sign from ``at`` on; -1 if there is none, which takes no time."""
        if sign not in self._last:
            self._last[sign] = self._text.rfind(sign)
        return self._text.find(sign, at) if at <= self._last[sign] else -1

    def _tags_named(self, name: str) -> list[_NamedTag]:
        """Returns all tags of a name in the text, which is searched once for the tags of all names."""
        if self._tags is None:
            self._tags = {}
            bracket = -1
            for match in _TAG_NAME.finditer(self._text):
                if bracket < match.end():
                    bracket = self._text.find(">", match.end())
                if bracket < 0:
                    break
                tag = _NamedTag(match.start(), bracket + 1, match[1] != "")
                self._tags.setdefault(match[2].lower(), []).append(tag)
        return self._tags.get(name, [])

    def _end_of_element(self, name: str, at: int) -> int | None:
        """Returns the end of an element whose content begins at ``at``; None if it is never closed.

        An element that is closed less often than opened ends at its first end tag, a script or style at the text's end.
        """
        if name in self._absent:
            return None
        depth, first = 1, None
        tags = self._tags_named(name)
        for number in range(bisect_left(tags, _NamedTag(at, 0, False)), len(tags)):
            start, end, closes = tags[number]
            if start < at:  # inside of the tag before
                continue
            at = end
            depth += -1 if closes else self._text[end - 2] != "/"
            if closes and (depth == 0 or name in _RAW or name in self._unbalanced):
                return end
            first = first or (end if closes else None)
        self._unbalanced.add(name)
        if first is None:
            self._absent.add(name)
        return len(self._text) if first is None and name in _RAW else first

    def _end_of_other(self, at: int) -> int | None:
        """Returns the end of the comment or declaration that begins at ``at``; None if there is none."""
        for begin, end in _OTHERS.items():
            if self._text.startswith(begin, at):
                found = self._find(end, at + 2)  # a comment may be <!-->
                return None if found < 0 else found + len(end)
        return None


def _numbered(match: re.Match[str]) -> _Markup:
    """Returns a placeholder, or a tag whose name is a number."""
    text, span = match[0], match.span()
    if text[0] != "<" or text[-2] == "/":
        return _Markup(*span, "alone")
    name = text.strip("</> ")
    return _Markup(*span, "close" if text[1] == "/" else "open", name)
