"""Reading of lines from a pipe, a terminal or a file, and output line by line."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from econmt.config import limits
from econmt.data.files import notice, writing
from econmt.data.text.corpus import decode_line
from econmt.errors import InputError, printable

PAUSE_SECONDS = 0.1
BLOCK_BYTES = 1 << 16
STANDARD_INPUT = "standard input"


def standard_input() -> int:
    """Returns the descriptor of standard input.

    Raises:
        InputError: Standard input is closed.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise InputError(f"{STANDARD_INPUT} is closed; name a file instead")
    return sys.stdin.fileno()


def _may_pause(descriptor: int) -> bool:
    """Returns True if more input may come later and waiting can be bounded: pipes, terminals, sockets."""
    if os.name != "posix":
        return False
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def read_chunks(descriptor: int, size: int, where: str = STANDARD_INPUT) -> Iterator[list[str]]:
    """Yields lines from a file descriptor, at most ``size`` at a time, fewer when the input pauses.

    A person who types a line, or a program that waits for an answer, is answered at once; a file in a pipe is read
    in full chunks. Lines before an unreadable one are yielded first.

    Raises:
        InputError: A line is not UTF-8 or contains a NUL byte; the message names the line.
    """
    bounded = _may_pause(descriptor)
    held: list[bytes] = []
    length, number, pending = 0, 0, list[str]()
    ended = False
    while not ended:
        block = os.read(descriptor, BLOCK_BYTES)
        ended = not block
        head, newline, tail = block.rpartition(b"\n")
        complete = b"".join([*held, head]).split(b"\n") if newline else []
        held, length = ([], 0) if newline else (held, length)
        held.append(tail)
        length += len(tail)
        if length >= limits.LINE_BYTES or (ended and length):  # the first is refused below
            complete.append(b"".join(held))
        for raw in complete:
            number += 1
            try:
                pending.append(decode_line(raw, where, number))
            except InputError:
                if pending:
                    yield pending
                raise
            if len(pending) >= size:
                yield pending
                pending = []
        if pending and bounded and not ended and not select.select([descriptor], [], [], PAUSE_SECONDS)[0]:
            yield pending
            pending = []
    if pending:
        yield pending


def check_not_read(path: Path | None, inputs: Iterable[Path | None]) -> None:
    """Refuses to overwrite a file that is being read; None means standard output and input.

    Raises:
        InputError: The output is one of the inputs.
    """
    for source in inputs:
        if _is_same(path, source):
            name = STANDARD_INPUT if source is None else source
            raise InputError(f"{path}: is also an input ({name}); choose another output file")


class LineOutput:
    """Writer of lines to standard output, if the path is None, or a file, as they come.

    The file is truncated when the first lines are written and grows with each chunk, so that an interrupted run leaves
    the finished lines. Links are followed, permissions stay, and devices and pipes are written to. It is none of the
    ``inputs``, the files that are being read, where None means standard input.

    Raises:
        InputError: The file cannot be written, or is one of the inputs.
    """

    def __init__(self, path: Path | None, inputs: Sequence[Path | None] = ()) -> None:
        self._path = path
        self._stream: IO[bytes] | None = None
        check_not_read(path, inputs)

    @property
    def is_seen(self) -> bool:
        """True if the output goes to a terminal, where it shows the progress."""
        return self._path is None and sys.stdout.isatty()

    def __enter__(self) -> Callable[[Iterable[str]], None]:
        return self._write

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._write(())
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with writing(self._path or Path()):
                stream.close()

    def _write(self, lines: Iterable[str]) -> None:
        content = "".join(line + "\n" for line in lines)
        if self._path is None:
            sys.stdout.write(content if not sys.stdout.isatty() else shown_on_terminal(content))
            sys.stdout.flush()
            return
        with writing(self._path):
            if self._stream is None:
                if self._path.is_fifo():
                    notice(f"{self._path}: is a pipe; waiting for its reader")
                self._stream = self._path.open("wb", buffering=0)
            rest = memoryview(content.encode("utf-8", "surrogateescape"))
            while rest:
                rest = rest[self._stream.write(rest) :]


def shown_on_terminal(text: str) -> str:
    """Escapes control characters, except tabs and line ends, so that lines cannot control a terminal."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def _is_same(output: Path | None, source: Path | None) -> bool:
    """Returns True if an output is a file that is being read; devices and pipes may be both."""
    if output is None:
        return False
    try:
        written = output.stat()
        read = os.fstat(0) if source is None else source.stat()
    except OSError:
        return False
    return stat.S_ISREG(written.st_mode) and os.path.samestat(written, read)
