"""Lines of text as ``econmt translate`` reads them: the same are translated, and the same are refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from econmt_runtime.errors import RuntimeInputError

LINE_BYTES = 1 << 26
"""Most bytes of a line."""

_READ = 1 << 17
"""Bytes that are read at a time."""

_STANDARD_INPUT = "standard input"


def input_chunks() -> Iterator[list[str]]:
    """Reads lines of standard input as they come, so that a program that writes one by one is answered at once.

    Raises:
        RuntimeInputError: naming the line, as :func:`decode_line`; or standard input is closed.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise RuntimeInputError(f"{_STANDARD_INPUT} is closed; name a file with --input")
    descriptor = sys.stdin.fileno()
    yield from _chunks(lambda: os.read(descriptor, _READ), _STANDARD_INPUT)


def file_chunks(path: Path) -> Iterator[list[str]]:
    """Reads the lines of a text file, compressed if its name ends in ``.gz``.

    Raises:
        RuntimeInputError: naming the file, and the line as :func:`decode_line`; the file is absent, a folder, a named
            pipe, empty or a broken gzip file, or cannot be read.
    """
    import gzip  # these two are seldom needed, and starting is to be quick
    import zlib

    # The pipes that a shell makes for <(command) have a writer, and no name in a folder.
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
    """Lines of what ``read`` gives until it gives nothing; those before one that cannot be read come first."""
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

    A carriage return at its end goes, and a byte order mark at the beginning of the first line.

    Raises:
        RuntimeInputError: naming the line, if it is too long, is not UTF-8, or holds a NUL byte.
    """
    if len(raw) >= LINE_BYTES:
        kind = "NUL bytes" if b"\0" in raw else "a line"
        raise RuntimeInputError(
            f"{where}:{number}: {kind} of {len(raw):,} bytes and more; is this a text file?"
        )
    raw = raw.removesuffix(b"\r")
    try:
        line = raw.decode("utf-8")
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
