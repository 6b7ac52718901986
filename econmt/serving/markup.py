"""Division of a text into sentences and the markup between them: line ends, or the tags of HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape, unescape
from typing import NamedTuple

from econmt.decoding.requests import Request

_UNTRANSLATED = frozenset({"script", "style", "code", "pre", "textarea", "kbd", "samp", "var"})
"""Elements whose text is left as it is."""
_RAW = frozenset({"script", "style"})
"""Elements whose text contains no tags."""
_TAG = re.compile(r"""<(/?)([a-zA-Z][^\s/<>"']*)(?=[\s/>])[^<>"']*(?:(?:"[^"]*"|'[^']*')[^<>"']*)*>""")
"""A tag with its name; a bracket in a quoted value does not end it."""
_BROKEN_TAG = re.compile(r"<(/?)([a-zA-Z][^\s/<>]*)(?=[\s/>])[^<>]*>")
"""A tag with a quote that is never closed."""
_OTHERS = {"<!--": "-->", "<![CDATA[": "]]>", "<!": ">", "<?": ">", "</": ">"}
"""Ends of other markup by its beginning; the first beginning that matches applies."""
_LONG_REFERENCE = re.compile(r"&#[0-9]{20,};?")
"""A character reference with too many digits for any character; Python refuses to read thousands of digits."""


class MarkupText(NamedTuple):
    """Sentences of one text and the markup around them.

    Attributes:
        lines: the sentences.
        gaps: markup before the first sentence, between sentences, and after the last one; one more than ``lines``.
        markup: True for HTML, in which angle brackets of sentences are escaped.
    """

    lines: list[Request]
    gaps: list[str]
    markup: bool

    def written(self, translations: Sequence[str]) -> str:
        """Returns the text with translations in place of its sentences."""
        put = [escape(each, quote=False) if self.markup else each for each in translations]
        return self.gaps[0] + "".join(line + gap for line, gap in zip(put, self.gaps[1:], strict=True))


def plain_text(request: Request) -> MarkupText:
    """Divides plain text into lines; each is a sentence, also a blank one."""
    lines = [request._replace(text=line) for line in request.text.replace("\r\n", "\n").split("\n")]
    return MarkupText(lines, ["", *["\n"] * (len(lines) - 1), ""], markup=False)


def html_text(request: Request) -> MarkupText:
    """Divides HTML: the text between two tags is a sentence; everything else stays as it is."""
    page = _Page()
    page.read(request.text)
    return MarkupText([request._replace(text=line) for line in page.lines], page.gaps, markup=True)


class _Page:
    """Parser of HTML that keeps markup exactly as it is written, which Python's own parser does not."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.gaps = [""]
        self._kept: list[str] = []

    def read(self, page: str) -> None:
        """Parses a page."""
        done = at = 0
        while (at := page.find("<", at)) >= 0:
            tag = _TAG.match(page, at) or _BROKEN_TAG.match(page, at)
            end = tag.end() if tag else _end_of_other(page, at)
            if end < 0:
                at += 1  # a bracket of the text
                continue
            self._text(page[done:at])
            self.gaps[-1] += page[at:end]
            if tag:
                end = self._tag(tag, page)
            done = at = end
        self._text(page[done:])

    def _tag(self, tag: re.Match[str], page: str) -> int:
        """Updates the open elements after a tag; returns the position to go on from, after the text of a script."""
        name, end = tag[2].lower(), tag.end()
        if tag[1]:
            if name in self._kept:
                del self._kept[self._kept.index(name) :]
        elif name in _UNTRANSLATED and not tag[0].endswith("/>"):
            self._kept.append(name)
            if name in _RAW:
                closing = re.compile(f"</{name}(?=[\\s/>])", re.IGNORECASE).search(page, end)
                behind = closing.start() if closing else len(page)
                self.gaps[-1] += page[end:behind]
                return behind
        return end

    def _text(self, raw: str) -> None:
        text = unescape(_LONG_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", raw))
        sentence = text.strip()
        if self._kept or not sentence:
            self.gaps[-1] += raw
            return
        self.gaps[-1] += text[: len(text) - len(text.lstrip())]
        self.lines.append(" ".join(sentence.split()))
        self.gaps.append(text[len(text.rstrip()) :])


def _end_of_other(page: str, at: int) -> int:
    """Returns the end of the comment or declaration that begins at ``at``, or -1 if there is none."""
    for begin, end in _OTHERS.items():
        if page.startswith(begin, at):
            found = page.find(end, at + len(begin))
            return -1 if found < 0 else found + len(end)
    return -1
