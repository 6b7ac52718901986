"""Exceptions with one-line messages for users, which the command line prints without a traceback."""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_NAMED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


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


def printable(text: object) -> str:
    r"""Returns untrusted text as one line without characters that control a terminal.

    Control characters, marks of text direction and undecodable bytes become Python escapes: ``\n``, ``\x1b``,
    ``\u202e``.
    """
    return _UNPRINTABLE.sub(_escaped, str(text))


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


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: Python's form of an undecodable byte
        code -= 0xDC00
    escape = f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _NAMED.get(match[0], f"\\x{code:02x}" if code < 0x100 else escape)


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
