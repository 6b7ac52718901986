"""Translations of lines: results of a search as text, with capitals restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from econmt.data.text.case import lower, upper

if TYPE_CHECKING:  # files are read in processes that start fast and import no torch
    from torch import Tensor

    from econmt.decoding.requests import Request


class NBestEntry(NamedTuple):
    """Hypothesis of a line's translation as text.

    Attributes:
        text: detokenised text, always a single line. tokens: its tokens without EOS.
        ids, score, log_probability, attention, cut: see :class:`~econmt.decoding.search.beam.Hypothesis`.
        alignment: pairs of source and target word numbers, from 0: each target word with the source words that it
            attends to most; empty without attention.
    """

    text: str
    tokens: list[str]
    ids: list[int]
    score: float
    log_probability: float
    attention: Tensor | None
    cut: bool
    alignment: Sequence[tuple[int, int]] = ()


class Translation(NamedTuple):
    """Translation of one line; the fields up to ``attention`` are those of its best hypothesis.

    A line without words is translated by a copy of itself with probability 1, without the model. A copy has one
    hypothesis without attention, whose words are aligned one to one; a blank line has none.
    """

    text: str
    score: float
    log_probability: float
    tokens: list[str]
    attention: Tensor | None
    hypotheses: list[NBestEntry]
    source_tokens: list[str]


EMPTY = Translation("", 0.0, 0.0, [], None, [], [])
"""Translation of a blank line."""

Divide = Callable[[str, str], tuple[Sequence[str], Callable[[Sequence[Translation]], Translation]]]
"""Function that divides a line, to be translated into a language: returns pieces, and a function that joins theirs."""


def one_line(text: str) -> str:
    """Returns ``text`` without line breaks, which would shift all lines after it, and without blanks at its ends.

    Byte subwords can produce both, and the sign for a blank may come as a subword of its own.
    """
    return text.replace("\n", " ").replace("\r", " ").strip()


def is_in_capitals(text: str, language: str) -> bool:
    """Returns True if a line of two words or more is all in capitals; a lone acronym is not."""
    return text != lower(text, language) and text == upper(text, language) and len(text.split()) > 1


def without_capitals(text: str, language: str) -> str:
    """Returns a line in lower case with a capital first letter."""
    small = lower(text, language)
    at = next((index for index, character in enumerate(small) if character.isalpha()), 0)
    return small[:at] + upper(small[at : at + 1], language) + small[at + 1 :]


def with_small_prefix(request: Request, language: str) -> Request:
    """Returns a request in capitals with the beginning of its translation, if in capitals too, in lower case.

    ``language`` is that of the translation.
    """
    prefix = request.target_prefix
    return request._replace(target_prefix=without_capitals(prefix, language)) if prefix.isupper() else request


def in_capital_letters(translation: Translation, language: str) -> Translation:
    """Returns a translation with its texts in capitals and unchanged tokens; ``language`` is its language."""
    entries = [entry._replace(text=upper(entry.text, language)) for entry in translation.hypotheses]
    return translation._replace(text=upper(translation.text, language), hypotheses=entries)
