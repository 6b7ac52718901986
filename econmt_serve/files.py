"""Files to translate: plain text, HTML pages and Word documents.

:mod:`econmt_serve.file_worker` reads them in a process of its own, which must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from econmt_serve.docx import WORD, WordDocument
from econmt_serve.encodings import UTF_8, WebEncoding, byte_order_mark, web_encoding
from econmt_serve.settings import Refused
from econmt_serve.text.markup import Marked
from econmt_serve.text.markup_reader import html_passage
from econmt_serve.text.passages import Hypothesis, TextDivision, plain_passage
from econmt_serve.text.sentences import Span

KINDS = {".txt": "text/plain", ".html": "text/html", ".docx": WORD}
"""Media types of files that can be translated, by the ends of their names."""
_DECLARED = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([^\s"'>;/]{1,40})""", re.IGNORECASE)
_CHARSET = re.compile(r"""\s*charset\s*=\s*"?([^\s"]*)"?\s*""", re.IGNORECASE)
_HEAD = 2048
"""Number of bytes at the beginning of a page in which its encoding is looked for."""


class PageOrText:
    """Plain text or an HTML page.

    The encoding is that of the byte order mark, or else of the content type, or else the one that a page declares, or
    else UTF-8.

    Args:
        content: bytes of the file. label: encoding that the content type names, or "". how: division into sentences.
        html: True for a page.

    Raises:
        Refused: the encoding is none of the web, or not the file's.
    """

    def __init__(self, content: bytes, label: str, how: TextDivision, *, html: bool) -> None:
        self._mark, self._encoding = byte_order_mark(content) or (b"", _declared(content, label, html=html))
        try:
            text = content[len(self._mark) :].decode(self._encoding.codec)
        except UnicodeError:
            problem = f"not in the encoding {self._encoding.name}; save it in UTF-8"
            if content.startswith(b"\x1f\x8b"):
                problem = "compressed with gzip; unpack it"
            raise Refused(400, f"the file is {problem}") from None
        if "\0" in text:
            raise Refused(
                400, "the file has NUL characters and is no text; send text, HTML or a Word document"
            )
        self._html = html
        self._passage = (html_passage if html else plain_passage)(text, how)

    @property
    def sentences(self) -> list[Marked]:
        """Sentences of the file in order."""
        return self._passage.sentences

    def written(self, translations: Sequence[Hypothesis]) -> tuple[bytes, str]:
        """Returns the file with the translations of all sentences, and its content type, which names the encoding.

        It is the encoding of the file; a text with characters that this encoding lacks is written in UTF-8.
        """
        text, mark, encoding = self._passage.filled(translations), self._mark, self._encoding
        if self._html:
            content = text.encode(encoding.codec, "xmlcharrefreplace")
            return mark + content, f"text/html; charset={encoding.name}"
        try:
            content = text.encode(encoding.codec)
        except UnicodeEncodeError:
            content, encoding = text.encode(), UTF_8
        return mark + content, f"text/plain; charset={encoding.name}"


def _declared(content: bytes, label: str, *, html: bool) -> WebEncoding:
    """Returns the encoding that the content type or a page itself names; UTF-8 if neither does."""
    match = _DECLARED.search(content[:_HEAD]) if html and not label else None
    if match is not None:
        label = match[1].decode("ascii", "replace")
    encoding = web_encoding(label or UTF_8.name)
    if encoding is None:
        raise Refused(400, f"the file's encoding {label[:100]} is none of the web; save it in UTF-8")
    # A declaration in bytes of ASCII is not in UTF-16, says the HTML standard.
    return UTF_8 if match is not None and encoding.name.startswith("utf-16") else encoding


def media_type(content_type: str) -> str:
    """Returns the media type of a content type without its parameters; raises Refused if it is none of KINDS."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in KINDS.values():
        raise Refused(
            415,
            f"content type {kind[:100] or 'none'} is not translated; send one of {', '.join(KINDS.values())}",
        )
    return kind


def read_file(
    content: bytes, content_type: str, how: TextDivision, most_characters: int | None = None
) -> WordDocument | PageOrText:
    """Reads a file.

    Args:
        content: bytes of the file. content_type: one of :data:`KINDS`, with a parameter ``charset`` or without.
        how: division into sentences. most_characters: maximum number of characters of all sentences; None: no limit.

    Raises:
        Refused: the file is of another kind, too long, damaged, or in an encoding that is not the web's.
    """
    kind = media_type(content_type)
    if most_characters is not None:
        how = how._replace(split=_Counting(how, most_characters).split)
    if kind == WORD:
        return WordDocument(content, how)
    parameters = map(_CHARSET.fullmatch, content_type.split(";")[1:])
    label = next((match[1] for match in parameters if match is not None), "")
    return PageOrText(content, label, how, html=kind == "text/html")


class _Counting:
    """Splitter that counts characters, so that a text that is too long is refused before all of it is divided."""

    def __init__(self, how: TextDivision, most: int) -> None:
        self._split, self._most, self._count = how.split, most, 0

    def split(self, text: str) -> list[Span]:
        """Returns the spans of a paragraph's sentences; raises Refused if all have more characters than allowed."""
        self._check(len(text) - text.count(" "))
        spans = self._split(text)
        self._count += sum(end - begin for begin, end in spans)
        self._check(0)
        return spans

    def _check(self, more: int) -> None:
        if self._count + more > self._most:
            problem = f"the file has more than the {self._most:,} characters of text that this server takes"
            raise Refused(413, f"{problem} at a time; send parts")
