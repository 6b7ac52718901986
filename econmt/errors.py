"""Exceptions with one-line messages for users, which the command line prints without a traceback."""

from __future__ import annotations

import errno
import os
import sys
import textwrap

from econmt_memory.report.text import printable as printable

REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EACCES: "check the permissions",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "give a name whose links lead somewhere",
}
"""Remedies for errors of the operating system by their numbers."""

quiet = False
"""True if standard error gets warnings and errors only; set by the command line for --quiet."""


def talk(line: str) -> None:
    """Prints a line, already :func:`printable`, on standard error; wraps it between words on a terminal."""
    if sys.stderr.isatty():
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):  # a replaced sys.stderr that has no terminal size
            width = 0
        line = textwrap.fill(
            line, width or 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    print(line, file=sys.stderr, flush=True)


class EconmtError(Exception):
    """Base class of errors whose message is written for users; the command line exits with ``exit_code``.

    Args:
        lines: the message, mostly one line; each is made :func:`printable`.
    """

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        self.lines = [printable(line) for line in lines]
        super().__init__("\n".join(self.lines))


class InputError(EconmtError):
    """Unusable input of the user; the message names file, line, key or shape, and what to do."""

    exit_code = 2


class TrainingError(EconmtError):
    """Training had to stop (loss not finite, out of memory, disk full); saved checkpoints stay intact."""
