"""Text of any origin, made safe to print."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def printable(text: object) -> str:
    r"""Returns untrusted text as one line without characters that control a terminal.

    Control characters, marks of text direction and undecodable bytes become Python escapes: ``\n``, ``\x1b``,
    ``\u202e``.
    """
    return _UNPRINTABLE.sub(_escaped, str(text))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: Python's form of an undecodable byte
        code -= 0xDC00
    return chr(code).encode("unicode_escape").decode("ascii")
