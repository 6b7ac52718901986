"""Word documents (.docx): the text of paragraphs as sentences, and documents with their translations.

Only the text between ``<w:t>`` and ``</w:t>`` and hyphens change, in the body, headers, footers and notes; every other
byte of the XML stays. Runs of one format without objects between them are like a pair of tags, so that in the
translation a bold word is bold, and a page number in its field, where their order stays the same. Specification:
ECMA-376, part 1, chapter 17 (WordprocessingML).
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple
from xml.parsers import expat

from econmt_serve.encodings import UTF_8, web_encoding
from econmt_serve.settings import Refused
from econmt_serve.text.markup import MARKUP, Marked, Tag
from econmt_serve.text.passages import Hypothesis, Passage, PassageBuilder, TextDivision

WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
"""Media type of a Word document."""
_MAIN = re.compile(r"word/document\d*\.xml")
_PARTS = re.compile(rf"{_MAIN.pattern}|word/(?:header\d*|footer\d*|footnotes|endnotes)\.xml")
_TEXTS = {"t": "", "noBreakHyphen": "-"}
"""Elements of a run with text, and what it begins with."""
_UNSEEN = "lastRenderedPageBreak", "softHyphen"
"""Elements of a run that are no objects; pictures, numbers of notes and the ends of fields are, and formulas."""
_SPACE = re.compile(
    "http://(?:schemas.openxmlformats.org/wordprocessingml/2006|purl.oclc.org/ooxml/wordprocessingml)/main "
)
"""Namespace of the elements: as usual, or in documents that are saved as Strict Open XML."""
_LARGEST = 1 << 26
"""Maximum number of bytes of an unpacked document."""
_LONGEST_NAME = 1000
"""Maximum number of characters of a namespace, which the parser copies for each element."""
_DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, struct.error, expat.ExpatError),
    *(EOFError, NotImplementedError, OSError, RuntimeError, ValueError),
)
"""Errors of a damaged archive, of one that is encrypted or compressed in an unknown way, and of broken XML."""
_MARK = re.compile("\ue000(/?)(\\d+)\ue001")
"""Stand-in for the begin or end of a format; its signs are for private use."""


class _Text(NamedTuple):
    """Element of :data:`_TEXTS`: its span in the XML, its text, which is never empty, and its style.

    The style is the format of its run, the link that it is in, and the number of objects before it.
    """

    start: int
    end: int
    text: str
    style: tuple[bytes, int, int]


class WordDocument:
    """A document whose sentences can be replaced.

    Args:
        content: bytes of the file. how: division of its paragraphs into sentences.

    Raises:
        Refused: the file is no document, or too large when unpacked.
    """

    def __init__(self, content: bytes, how: TextDivision) -> None:
        try:
            self._files = _unpacked(content)
            if not any(_MAIN.fullmatch(file.filename) for file in self._files):
                raise ValueError("it has no word/document.xml")
            self._parts = {
                file.filename: _Part(part, how)
                for file, part in self._files.items()
                if _PARTS.fullmatch(file.filename)
            }
        except _DAMAGES as error:
            raise Refused(400, f"this is not a .docx document: {error}") from None

    @property
    def sentences(self) -> list[Marked]:
        """Sentences of all parts in order."""
        return [
            each for part in self._parts.values() for passage in part.passages for each in passage.sentences
        ]

    def written(self, translations: Sequence[Hypothesis]) -> tuple[bytes, str]:
        """Returns the document with the translations of :attr:`sentences`, and its content type."""
        rest = iter(translations)
        output = io.BytesIO()
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, unchanged in self._files.items():
                part = self._parts.get(file.filename)
                content = unchanged if part is None else _written_part(part, rest)
                archive.writestr(file, content, zipfile.ZIP_DEFLATED)
        return output.getvalue(), WORD


def _unpacked(content: bytes) -> dict[zipfile.ZipInfo, bytes]:
    """Returns the files of an archive; raises Refused if they are too large, and one of :data:`_DAMAGES`."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = archive.infolist()
        if sum(file.file_size for file in files) > _LARGEST:
            raise Refused(413, f"the document has more than {_LARGEST >> 20} MiB when unpacked; split it")
        if len({file.filename for file in files}) < len(files):
            raise ValueError("a file is in it twice")
        # Other methods unpack without a bound.
        if any(file.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for file in files):
            raise ValueError("it is compressed in another way than by deflate")
        return {file: archive.read(file) for file in files}


def _passage(piece: Sequence[_Text], how: TextDivision) -> Passage:
    builder = PassageBuilder(how)
    texts = ["".join(text.text for text in each) for each in _formats(piece)]
    begins, ends = ([text[at].strip() for text in texts] for at in (0, -1))
    around = zip(["", *ends], begins, ends, [*begins[1:], ""], strict=False)
    for number, (before, first, last, behind) in enumerate(around):
        if len(texts) > 1:
            builder.tag(Tag(f"\ue000{number}\ue001", str(number), "open", (before and MARKUP, first)))
        builder.text(texts[number], lambda written: _MARK.sub("", written))
        if len(texts) > 1:
            builder.tag(Tag(f"\ue000/{number}\ue001", str(number), "close", (last, behind and MARKUP)))
    return builder.passage()


def _formats(piece: Sequence[_Text]) -> list[list[_Text]]:
    """Returns the neighbouring texts of one format together."""
    return [list(texts) for _, texts in groupby(piece, key=lambda text: text.style)]


def _written_part(part: _Part, translations: Iterator[Hypothesis]) -> bytes:
    changes: list[tuple[int, int, bytes]] = []
    for piece, passage in zip(part.pieces, part.passages, strict=True):
        if not passage.sentences:
            continue
        written = passage.filled([next(translations) for _ in passage.sentences])
        formats = _formats(piece)
        sources = ["".join(text.text for text in each) for each in formats]
        texts, done, current = [""] * len(formats), 0, 0
        for mark in _MARK.finditer(written):
            texts[current] += written[done : mark.start()]
            done, number = mark.end(), min(int(mark[2]), len(formats) - 1)
            if mark[1] and "".join(sources[number + 1 : number + 2]).startswith(" "):
                number += 1  # which the blank between the two belongs to
            # Words keep their order, formats are where they were: a format that would have to move is given up.
            current = max(current, number)
        texts[current] += written[done:]
        if not any("  " in source for source in sources):
            texts = _single_blanks(texts, sources)
        for text, each in zip(texts, formats, strict=True):
            for number, element in enumerate(each):
                content = _element(part, element, "" if number else text)
                changes.append((element.start, element.end, content))
    done = 0
    pieces = []
    for start, end, content in sorted(changes):
        pieces += [part.xml[done:start], content]
        done = end
    return b"".join([*pieces, part.xml[done:]])


def _single_blanks(texts: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Returns texts that follow one another with a second blank beside a blank only where their sources have it."""
    single: list[str] = []
    last, before = " ", " "
    for text, source in zip(texts, sources, strict=True):
        keeps = last != " " or (before.endswith(" ") and source.startswith(" "))
        single.append(re.sub(" +", " ", text if keeps else text.lstrip(" ")))
        last, before = (last + single[-1])[-1:], source
    return single


def _element(part: _Part, element: _Text, text: str) -> bytes:
    """Returns an element ``w:t`` with another text in an element's place; its prefix need not be ``w``."""
    prefix = re.match(rb"<((?:[^\s/>:]+:)?)", part.xml[element.start : element.end])
    assert prefix is not None
    content = escape(text, quote=False).encode(part.encoding, "xmlcharrefreplace")
    return b'<%st xml:space="preserve">%s</%st>' % (prefix[1], content, prefix[1])


class _Part:
    """XML of a part, read by the byte positions of its texts.

    Attributes:
        pieces: texts of paragraphs, parted at tabs and line breaks. passages: the sentences of each piece.
        encoding: encoding of new text: UTF-8 if the part is in UTF-8; else ASCII, which the other encodings contain.
    """

    def __init__(self, xml: bytes, how: TextDivision) -> None:
        self.xml = xml
        self.pieces: list[list[_Text]] = []
        self.encoding = "utf-8"
        self._open: list[tuple[str, int]] = []
        self._open_formats = self._objects = 0
        self._paragraphs: list[list[_Text]] = []
        self._format, self._text = b"", list[str]()
        if b"\0" in xml[:100]:
            raise Refused(400, "this document is not in UTF-8; save it as .docx again")
        self._parser = parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.XmlDeclHandler, parser.StartDoctypeDeclHandler = self._declare, self._refuse
        parser.StartNamespaceDeclHandler = self._check_namespace
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.Parse(xml, True)
        self.passages = [_passage(piece, how) for piece in self.pieces]

    def _declare(self, _: str, encoding: str | None, __: int) -> None:
        known = web_encoding(encoding or UTF_8.name)
        if known is None:
            raise Refused(400, f"this document is in the encoding {encoding}; save it as .docx again")
        self.encoding = "utf-8" if known == UTF_8 else "ascii"

    def _refuse(self, *_: object) -> None:
        raise ValueError("its XML declares a document type")

    def _check_namespace(self, _: str | None, name: str | None) -> None:
        if len(name or "") > _LONGEST_NAME:
            raise ValueError(f"a namespace has more than {_LONGEST_NAME:,} characters")

    def _start(self, name: str, _: object) -> None:
        name, at = _SPACE.sub("", name), self._parser.CurrentByteIndex
        self._open.append((name, at))
        if name == "p":
            self._paragraphs.append([])
        elif name == "r":
            self._format = b""
        elif name == "rPr":
            self._open_formats += 1
        elif name in _TEXTS:
            self._text = [_TEXTS[name]]
            self._parser.CharacterDataHandler = self._text.append
        elif (
            self._paragraphs and (self._open[-2][0] == "r" or name.endswith(" oMath")) and name not in _UNSEEN
        ):
            if name in ("tab", "ptab", "br", "cr"):
                self._end_piece()
            self._objects += 1

    def _end(self, name: str) -> None:
        name, start = self._open.pop()
        at, parents = self._parser.CurrentByteIndex, [each for each, _ in self._open[-1:]]
        if name == "rPr":
            self._open_formats -= 1
            if parents == ["r"] and not self._open_formats:
                self._format = self.xml[start:at]
        elif name in _TEXTS:
            self._parser.CharacterDataHandler = None
            if parents == ["r"] and self._paragraphs and any(self._text):
                holder = self._open[-2]
                is_empty = len(self._text) == 1 and self.xml.endswith(b"/>", start, at)
                end = at if is_empty else self.xml.index(b">", at) + 1
                style = self._format, -1 if holder[0] == "p" else holder[1], self._objects
                self._paragraphs[-1].append(_Text(start, end, "".join(self._text), style))
        elif name == "p":
            self._end_piece()
            self._paragraphs.pop()

    def _end_piece(self) -> None:
        if self._paragraphs[-1]:
            self.pieces.append(self._paragraphs[-1])
        self._paragraphs[-1] = []
