"""Translation memories in TMX (Localization Industry Standards Association, TMX 1.4b), read as a stream.

Python's expat parses them. Declarations of entities are refused, so that no file can grow in memory, and nothing
outside the file is read: a document type that it names is not looked at.
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
"""Elements of a segment whose content is the formatting of another program, not text."""


class _Memory:
    """Collects the units of a memory that have both languages."""

    def __init__(self, path: Path, source: str, target: str) -> None:
        self.path, self.languages = path, (source.lower(), target.lower())
        self.seen: set[str] = set()
        self.found: list[tuple[str, str]] = []
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
        """Where the parser is."""
        return int(self.parser.CurrentLineNumber)

    def _refuse_entity(self, name: str, *_: object) -> None:
        raise InputError(
            f"{self.path}:{self.line}: declares the entity {name!r}, which could make much of a little text; write "
            "its characters into the text and take the declaration out"
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
            # Like the program that wrote the memory, a segment may break its lines anywhere.
            self._unit.setdefault(self._language, " ".join("".join(self._parts).split()))
            self._parts = None
        elif name in _CODES and self._parts is not None:
            self._codes -= 1
        elif name == "tu":
            sides = [self._side(language) for language in self.languages]
            if sides[0] is not None and sides[1] is not None:
                self.found.append((sides[0], sides[1]))

    def _side(self, wanted: str) -> str | None:
        """The text in a language; in one of a country, as en-US for en, where there is no other."""
        near = (code for code in self._unit if code.replace("_", "-").partition("-")[0] == wanted)
        code = wanted if wanted in self._unit else next(near, None)
        return None if code is None else self._unit[code]

    def _text(self, text: str) -> None:
        if self._parts is None or self._codes:
            return
        self._length += len(text)
        if self._length > limits.LINE_BYTES:
            raise InputError(f"{self.path}:{self.line}: a segment of {self._length:,} characters and more")
        self._parts.append(text)


def read_tmx(path: Path, source: str, target: str) -> Iterator[tuple[str, str]]:
    """Stream the pairs of a translation memory (gzip if its name ends in ``.gz``).

    Units that lack one of the languages are passed over, and so is another program's formatting in a segment.

    Args:
        path: the file.
        source, target: codes of languages, as ``en``; ``en-US`` in the file is ``en``, too.

    Raises:
        InputError: missing or unreadable file, no XML, declared entities, or no unit with both languages; the message
            names the file, and the line if there is one.
    """
    refuse_pipe(path)
    memory = _Memory(path, source, target)
    count = 0
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            for found in _units(memory, cast(BinaryIO, stream)):
                count += 1
                yield found
    except expat.ExpatError as error:
        raise InputError(f"{path}:{error.lineno}: not valid XML: {expat.ErrorString(error.code)}") from None
    except (LookupError, ValueError) as error:  # of the encoding that the file names
        raise InputError(f"{path}:{memory.line}: cannot be decoded: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path}: corrupt gzip file after line {memory.line} ({error}); fetch it again"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not count:
        there = ", ".join(sorted(memory.seen)) or "none"
        raise InputError(f"{path}: no unit has both {source} and {target}; its languages: {there}")


def _units(memory: _Memory, stream: BinaryIO) -> Iterator[tuple[str, str]]:
    while True:
        block = stream.read(_BLOCK)
        memory.parser.Parse(block, not block)
        yield from memory.found
        memory.found.clear()
        if not block:
            return
