"""Streaming reader of translation memories in TMX (Localization Industry Standards Association, TMX 1.4b).

Uses Python's expat. Entity declarations are errors, because they can expand a small file without bound, and external
files such as a document type definition are not read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast
from xml.parsers import expat

from econmt.config import limits
from econmt.data.files import refuse_pipe
from econmt.errors import InputError

_BLOCK = 1 << 16

_CODES = {"bpt", "ept", "it", "ph", "ut"}
"""Elements of a segment that contain formatting codes instead of text."""


class _Memory:
    """Parser state that collects the translation units with both languages."""

    def __init__(self, path: Path, source: str, target: str) -> None:
        self.path, self.languages = path, (source.lower(), target.lower())
        self.seen: set[str] = set()
        self.pairs: list[tuple[str, str]] = []
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        self.parser.EntityDeclHandler = self._refuse_entity
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.SkippedEntityHandler = lambda *_: self._text(" ")
        self._unit: dict[str, str] = {}
        self._language = ""
        self._parts: list[str] | None = None
        self._length = self._codes = 0

    @property
    def line(self) -> int:
        """Current line of the parser."""
        return int(self.parser.CurrentLineNumber)

    def _refuse_entity(self, name: str, *_: object) -> None:
        raise InputError(
            f"{self.path}:{self.line}: declares the entity {name!r}, which is not allowed; write its characters "
            "into the text and remove the declaration"
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            self._unit = {}
        elif name == "tuv":
            self._language = attributes.get("xml:lang", attributes.get("lang", "")).lower()
            self.seen.add(self._language)
        elif name == "seg":
            self._parts, self._length, self._codes = [], 0, 0
        elif name in _CODES and self._parts is not None:
            self._codes += 1

    def _end(self, name: str) -> None:
        if name == "seg" and self._parts is not None:
            # Segments may contain line breaks anywhere.
            self._unit.setdefault(self._language, " ".join("".join(self._parts).split()))
            self._parts = None
        elif name in _CODES and self._parts is not None:
            self._codes -= 1
        elif name == "tu":
            sides = [self._side(language) for language in self.languages]
            if sides[0] is not None and sides[1] is not None:
                self.pairs.append((sides[0], sides[1]))

    def _side(self, language: str) -> str | None:
        """Returns the text in a language, or else in one of its country variants, such as en-US for en."""
        variants = (code for code in self._unit if code.replace("_", "-").partition("-")[0] == language)
        code = language if language in self._unit else next(variants, None)
        return None if code is None else self._unit[code]

    def _text(self, text: str) -> None:
        if self._parts is None or self._codes:
            return
        self._length += len(text)
        if self._length > limits.LINE_BYTES:
            raise InputError(
                f"{self.path}:{self.line}: a segment of {self._length:,} characters or more; is this a translation "
                "memory?"
            )
        self._parts.append(text)


def read_tmx(path: Path, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs of a translation memory (gzip if its name ends in ``.gz``).

    Skips units that lack one of the languages (``en`` also matches ``en-US``), and formatting codes in segments.

    Raises:
        InputError: if the file is missing, unreadable or not valid XML, declares entities, or has no unit with both
            languages; the message names the file, and the line if there is one.
    """
    refuse_pipe(path)
    memory = _Memory(path, source, target)
    count = 0
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            for pair in _units(memory, cast(BinaryIO, stream)):
                count += 1
                yield pair
    except expat.ExpatError as error:
        raise InputError(f"{path}:{error.lineno}: not valid XML: {expat.ErrorString(error.code)}") from None
    except (LookupError, ValueError) as error:  # from the declared encoding
        raise InputError(f"{path}:{memory.line}: cannot be decoded: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path}: corrupt gzip file after line {memory.line} ({error}); fetch it again"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not count:
        languages = ", ".join(sorted(memory.seen)) or "none"
        raise InputError(f"{path}: no unit has both {source} and {target}; its languages: {languages}")


def _units(memory: _Memory, stream: BinaryIO) -> Iterator[tuple[str, str]]:
    while True:
        block = stream.read(_BLOCK)
        memory.parser.Parse(block, not block)
        yield from memory.pairs
        memory.pairs.clear()
        if not block:
            return
