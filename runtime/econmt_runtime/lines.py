"""Lines of text, accepted and refused by the same rules as in ``econmt translate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from econmt_runtime.errors import RuntimeInputError

LINE_BYTES = 1 << 26
"""Bytes from which on a line is refused."""

_READ = 1 << 17
"""Number of bytes per read."""

_STANDARD_INPUT = "standard input"


def input_chunks() -> Iterator[list[str]]:
    """Yields lines of standard input as they arrive, so that an interactive program gets each answer at once.

    Raises:
        RuntimeInputError: If standard input is closed, or as :func:`decode_line`.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise RuntimeInputError(f"{_STANDARD_INPUT} is closed; name a file with --input")
    stream: Any = sys.stdin.buffer  # which reads a console of Windows as UTF-8, while os.read does not
    yield from _chunks(lambda: stream.read1(_READ), _STANDARD_INPUT)


def file_chunks(path: Path) -> Iterator[list[str]]:
    """Yields the lines of a text file, which is decompressed if its name ends in ``.gz``.

    Raises:
        RuntimeInputError: If the file is absent, a folder, a named pipe, empty, a broken gzip file or unreadable, or as
            :func:`decode_line`; the message names the file and the line.
    """
    import gzip  # imported here to keep start-up fast, as both are seldom needed
    import zlib

    # A shell's pipe for <(command) is accepted: it has a writer, and no entry in a folder.
    if path.is_fifo() and Path(os.path.realpath(path)).exists():
        raise RuntimeInputError(
            f"{path}: a named pipe, not a file; give a file, or its text on standard input"
        )
    empty = True
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            for lines in _chunks(lambda: stream.read(_READ), str(path)):
                empty = False
                yield lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RuntimeInputError(f"{path}: corrupt gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise RuntimeInputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if empty:
        raise RuntimeInputError(f"{path}: the file is empty")


def _chunks(read: Callable[[], bytes], where: str) -> Iterator[list[str]]:
    """Yields lines until ``read`` returns nothing; those before an invalid line come before its error."""
    held: list[bytes] = []
    length, number, ended = 0, 0, False
    while not ended:
        block = read()
        ended = not block
        *complete, rest = block.split(b"\n")
        if complete:
            complete[0] = b"".join([*held, complete[0]])
            held, length = [], 0
        held.append(rest)
        length += len(rest)
        if length >= LINE_BYTES or (ended and length):  # the first is refused below
            complete.append(b"".join(held))
        lines: list[str] = []
        for raw in complete:
            number += 1
            try:
                lines.append(decode_line(raw, where, number))
            except RuntimeInputError:
                if lines:
                    yield lines
                raise
        if lines:
            yield lines


def decode_line(raw: bytes, where: str, number: int) -> str:
    """Decodes line ``number``, given without its newline.

    A carriage return at its end, and a byte order mark at the beginning of the first line, are removed.

    Raises:
        RuntimeInputError: If the line is too long, is not UTF-8, or holds a NUL byte; the message names the line.
    """
    if len(raw) >= LINE_BYTES:
        kind = "NUL bytes, a line" if b"\0" in raw else "a line"
        raise RuntimeInputError(
            f"{where}:{number}: {kind} of {len(raw):,} bytes or more; is this a text file?"
        )
    try:
        line = raw.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RuntimeInputError(
            f"{where}:{number}: not valid UTF-8 (byte 0x{raw[error.start]:02x} at column {error.start + 1}); "
            "convert the text to UTF-8"
        ) from None
    if "\0" in line:
        raise RuntimeInputError(
            f"{where}:{number}: NUL byte at column {line.index(chr(0)) + 1}; is this a text file?"
        )
    return line.removeprefix("\ufeff") if number == 1 else line
