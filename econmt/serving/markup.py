"""Texts with what stands around the sentences in them: line ends, or the tags of HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from typing import NamedTuple

from econmt.decoding.requests import Request

_KEPT = frozenset({"script", "style", "code", "pre", "textarea", "kbd", "samp", "var"})
"""Elements whose text is no sentence."""
_RAW = frozenset({"script", "style"})
"""Those of them whose text has no character references."""
_EDGES = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)


class Text(NamedTuple):
    """Sentences of one text and what stands around them.

    Attributes:
        lines: the sentences.
        gaps: what stands before the first of them, between them, and behind the last, one more than ``lines``.
        markup: whether it is HTML, so that a sentence's own angle brackets are escaped.
    """

    lines: list[Request]
    gaps: list[str]
    markup: bool

    def written(self, translations: Sequence[str]) -> str:
        """The text with translations in the places of its sentences."""
        put = [escape(each, quote=False) if self.markup else each for each in translations]
        return self.gaps[0] + "".join(line + gap for line, gap in zip(put, self.gaps[1:], strict=True))


def plain_text(request: Request) -> Text:
    """A text whose lines are sentences, blank ones too."""
    lines = [request._replace(text=line) for line in request.text.replace("\r\n", "\n").split("\n")]
    return Text(lines, ["", *["\n"] * (len(lines) - 1), ""], markup=False)


def html_text(request: Request) -> Text:
    """HTML: what stands between two tags is a sentence by itself; scripts, styles and code stay as they are."""
    parser = _Parser()
    parser.feed(request.text)
    parser.close()
    return Text([request._replace(text=line) for line in parser.lines], parser.gaps, markup=True)


class _Parser(HTMLParser):
    """Finds the sentences, and keeps what is around them as it is written."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self.gaps = [""]
        self._kept: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.gaps[-1] += self.get_starttag_text() or ""
        if tag in _KEPT:
            self._kept.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.gaps[-1] += self.get_starttag_text() or ""

    def handle_endtag(self, tag: str) -> None:
        self.gaps[-1] += f"</{tag}>"
        if tag in self._kept:
            del self._kept[self._kept.index(tag) :]

    def handle_data(self, data: str) -> None:
        if self._kept:
            self.gaps[-1] += data if _RAW.intersection(self._kept) else escape(data, quote=False)
            return
        found = _EDGES.fullmatch(data)
        assert found is not None
        before, sentence, behind = found.groups()
        self.gaps[-1] += before
        if sentence:
            self.lines.append(" ".join(sentence.split()))
            self.gaps.append("")
        self.gaps[-1] += behind

    def handle_comment(self, data: str) -> None:
        self.gaps[-1] += f"<!--{data}-->"

    def handle_decl(self, decl: str) -> None:
        self.gaps[-1] += f"<!{decl}>"

    def handle_pi(self, data: str) -> None:
        self.gaps[-1] += f"<?{data}>"

    def unknown_decl(self, data: str) -> None:
        self.gaps[-1] += f"<![{data}]>"
