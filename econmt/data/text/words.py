"""Blanks between words, text without words, which is copied, and addresses, which translations keep as they are.

The module imports nothing that is slow, for programs that must start fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

BLANKS = " \t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"


_SIGN = "[!#-%'*-;=?-~\u00c0-\u0dff]|&amp;|&(?!#?\\w+;)"
"""Character of a URL besides round brackets; those of scripts without blanks end it, and so do character references."""
_ADDRESS = re.compile(
    rf"(?<![A-Za-z0-9])(?:[A-Za-z][A-Za-z0-9+.-]{{1,20}}://|www\.)(?:{_SIGN}|\((?:{_SIGN})*\))*"
    rf"(?:[#-%/0-9=@A-Za-z&\u00c0-\u0dff]|\((?:{_SIGN})*\))(?<!&)"
    r"|(?<![\w.%+-])(?:mailto:)?[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})+"
)
_TRIGGERS = "://", "www.", "@"


def addresses(text: str) -> Iterator[re.Match[str]]:
    """Yields the URLs and e-mail addresses of a text, without the punctuation after them."""
    if any(trigger in text for trigger in _TRIGGERS):
        yield from _ADDRESS.finditer(text)


def has_words(text: str) -> bool:
    """Returns True if a text has a letter outside of its addresses."""
    if not any(map(str.isalpha, text)):
        return False
    done = 0
    for address in addresses(text):
        if any(map(str.isalpha, text[done : address.start()])):
            return True
        done = address.end()
    return any(map(str.isalpha, text[done:]))
