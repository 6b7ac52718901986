"""Lines in capital letters, which are translated in lower case."""

from __future__ import annotations


def is_in_capitals(text: str) -> bool:
    """Returns True if a line of two words or more is all in capitals; a lone acronym is not."""
    return text != text.lower() and text == text.upper() and len(text.split()) > 1


def without_capitals(text: str) -> str:
    """Returns a line in lower case with a capital first letter."""
    small = text.lower()
    at = next((place for place, character in enumerate(small) if character.isalpha()), 0)
    return small[:at] + small[at].upper() + small[at + 1 :]
