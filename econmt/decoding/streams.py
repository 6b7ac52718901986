"""Lines from a pipe, a terminal or a file, and output that is either whole or not there."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from econmt.data.corpus import decode_line
from econmt.data.files import whole_file, writing
from econmt.errors import InputError

PAUSE_SECONDS = 0.1
BLOCK_BYTES = 1 << 16
STANDARD_INPUT = "standard input"


def standard_input() -> int:
    """The descriptor of standard input.

    Raises:
        InputError: if it is closed.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise InputError(f"{STANDARD_INPUT} is closed; name a file instead")
    return sys.stdin.fileno()


def _may_pause(descriptor: int) -> bool:
    """Whether more input may come later and a wait for it can be bounded: pipes, terminals and sockets."""
    if os.name != "posix":
        return False
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def read_chunks(descriptor: int, size: int, where: str = STANDARD_INPUT) -> Iterator[list[str]]:
    """Read lines from a file descriptor, at most ``size`` at a time, fewer as soon as the input pauses.

    So a person who types a line, or a program that waits for an answer, gets it at once, and a file in a pipe is read
    in full chunks. Lines before one that cannot be read are given first.

    Raises:
        InputError: naming the line, if it is not UTF-8 or holds a NUL byte.
    """
    bounded = _may_pause(descriptor)
    rest, number, pending = b"", 0, list[str]()
    ended = False
    while not ended:
        block = os.read(descriptor, BLOCK_BYTES)
        ended = not block
        *complete, rest = (rest + block).split(b"\n")
        if ended and rest:
            complete.append(rest)
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


@contextmanager
def line_output(path: Path | None) -> Iterator[Callable[[Iterable[str]], object]]:
    """A function that writes lines: to standard output at once, or to ``path``.

    The file appears only once everything has been written: an interrupted run leaves an older one as it was.

    Raises:
        InputError: if the file cannot be written.
    """
    if path is None:
        yield _write_to_standard_output
        return
    with writing(path), whole_file(path) as stream:
        yield lambda lines: stream.write("".join(line + "\n" for line in lines).encode())


def _write_to_standard_output(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(line + "\n" for line in lines))
    sys.stdout.flush()
