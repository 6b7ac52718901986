"""The errors a user can mend: one clear line each, printed by the command line without a traceback."""

from __future__ import annotations

import os
import re
import sys
import textwrap

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_NAMED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def printable(text: object) -> str:
    r"""Text of unknown origin for a person to read: one line that cannot steer a terminal.

    Control characters, marks that turn the direction of what follows, and bytes that were no UTF-8 are written as
    Python writes them: ``\n``, ``\x1b``, ``\u202e``.
    """
    return _UNPRINTABLE.sub(_escaped, str(text))


def talk(line: str) -> None:
    """Prints a line that is :func:`printable` on standard error.

    On a terminal it is broken between words; elsewhere one message stays one line.
    """
    if sys.stderr.isatty():
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):  # something that only stands for a terminal
            width = 0
        line = textwrap.fill(
            line, width or 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    print(line, file=sys.stderr, flush=True)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte that is no UTF-8
        code -= 0xDC00
    wide = f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _NAMED.get(found[0], f"\\x{code:02x}" if code < 0x100 else wide)


class EconmtError(Exception):
    """A failure told in lines written for the user, mostly one; the command line exits with ``exit_code``.

    Args:
        lines: what to tell; names and data in them may hold any character, see :func:`printable`.
    """

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        self.lines = [printable(line) for line in lines]
        super().__init__("\n".join(self.lines))


class InputError(EconmtError):
    """Something the user gave cannot be used; the message names file, line, key or shape, and what to do."""

    exit_code = 2


class TrainingError(EconmtError):
    """Training had to stop (a loss that is not finite, no memory, a full disk); what was saved stays whole."""
