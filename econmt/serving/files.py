"""Files to translate: plain text, HTML pages and Word documents."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from econmt.decoding.markup import Marked
from econmt.decoding.markup_reader import html_passage
from econmt.decoding.passages import TextDivision, plain_passage
from econmt.decoding.translation import Translation
from econmt.serving.docx import WordDocument
from econmt.serving.settings import Refused

WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
KINDS = ("text/plain", "text/html", WORD)
"""Media types of files that can be translated."""
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
_HEAD = 2048
"""Number of bytes at the beginning of a page in which its encoding is looked for."""


class TranslatableFile(Protocol):
    """File whose sentences can be replaced by their translations."""

    @property
    def sentences(self) -> list[Marked]:
        """Sentences of the file in order."""

    def written(self, translations: Sequence[Translation]) -> bytes:
        """Returns the file with the translations of all sentences."""


class PageOrText:
    """Plain text or an HTML page in the encoding that it declares, which is UTF-8 otherwise.

    Raises:
        Refused: the encoding is unknown, or not the file's.
    """

    def __init__(self, content: bytes, how: TextDivision, *, html: bool) -> None:
        declared = (
            _CHARSET.search(content[:_HEAD]) if html and not content.startswith(codecs.BOM_UTF8) else None
        )
        unmarked = "utf-8-sig" if content.startswith(codecs.BOM_UTF8) else "utf-8"
        self._encoding = declared[1].decode("ascii") if declared else unmarked
        try:
            text = content.decode(self._encoding)
        except (LookupError, UnicodeError):
            problem = f"the file is not in the encoding {self._encoding}"
            raise Refused(400, f"{problem}; save it in UTF-8") from None
        if "\0" in text:
            raise Refused(
                400, "the file has NUL characters and is no text; send text, HTML or a Word document"
            )
        self._errors = "xmlcharrefreplace" if html else "strict"
        self._passage = (html_passage if html else plain_passage)(text, how)

    @property
    def sentences(self) -> list[Marked]:
        """Sentences of the file in order."""
        return self._passage.sentences

    def written(self, translations: Sequence[Translation]) -> bytes:
        """Returns the file with the translations of all sentences."""
        return self._passage.written(translations).encode(self._encoding, self._errors)


def read_file(content: bytes, kind: str, how: TextDivision) -> TranslatableFile:
    """Reads a file of one of :data:`KINDS`; raises Refused for any other or a damaged one."""
    if kind not in KINDS:
        raise Refused(
            415, f"content type {kind[:100] or 'none'} is not translated; send one of {', '.join(KINDS)}"
        )
    return WordDocument(content, how) if kind == WORD else PageOrText(content, how, html=kind == "text/html")
