"""Change of case by the rules of a language: in Turkish and Azeri i and İ are one letter, ı and I another.

Languages are given by their codes, such as ``tr`` or ``tr-TR``; other languages, and none, follow Unicode's default.
"""

from __future__ import annotations

import re

_DOTTED = ("tr", "tur", "az", "aze")
"""Languages that write a small i without its dot."""
_TO_SMALL = str.maketrans({"I": "ı", "İ": "i"})
_TO_CAPITAL = str.maketrans({"i": "İ", "ı": "I"})
_DECOMPOSED = "I\u0307"


def _has_dotless_i(language: str) -> bool:
    return re.split("[-_]", language.lower())[0] in _DOTTED


def lower(text: str, language: str) -> str:
    """Returns a text in small letters."""
    if _has_dotless_i(language):
        text = text.replace(_DECOMPOSED, "İ").translate(_TO_SMALL)
    return text.lower()


def upper(text: str, language: str) -> str:
    """Returns a text in capitals."""
    return (text.translate(_TO_CAPITAL) if _has_dotless_i(language) else text).upper()


def folded(text: str, language: str) -> str:
    """Returns a text in which letters that differ in case only are equal."""
    return (lower(text, language) if _has_dotless_i(language) else text).casefold()
