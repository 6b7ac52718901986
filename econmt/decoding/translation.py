"""Translations of lines: results of a search as text, with capitals restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from econmt.data.text.vocabulary import UNK, Vocabularies, split_words
from econmt.decoding.alignment import copied, hard_alignment
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import Hypothesis


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


def one_line(text: str) -> str:
    """Returns ``text`` without line breaks, which would shift all lines after it, and without blanks at its ends.

    Byte subwords can produce both, and the sign for a blank may come as a subword of its own.
    """
    return text.replace("\n", " ").replace("\r", " ").strip()


def copy_of(text: str, vocabularies: Vocabularies) -> Translation:
    """Returns the translation of a line that is copied, see :class:`Translation`."""
    written = one_line(text)
    if not written:
        return EMPTY
    tokens, ids = vocabularies.target.written(written), vocabularies.target.encode(written)
    alignment = [(word, word) for word in range(len(split_words(written)))]
    entry = NBestEntry(written, tokens, ids, 0.0, 0.0, None, False, alignment)
    return Translation(written, 0.0, 0.0, tokens, None, [entry], vocabularies.source.written(written))


def translation_of(
    text: str,
    source: Sequence[int],
    hypotheses: Sequence[Hypothesis],
    written: Iterator[str],
    vocabularies: Vocabularies,
    *,
    replace_unk: bool,
) -> Translation:
    """Makes the translation of a line's ``text`` and ids; ``written`` yields the hypotheses' texts in turn.

    With ``replace_unk`` the source text that an unknown token attends to most takes its place.
    """
    source_tokens = vocabularies.source_tokens(source, text)
    entries = []
    for hypothesis, made in zip(hypotheses, written, strict=False):
        attention = hypothesis.attention
        ids, tokens = vocabularies.resolved(hypothesis.ids, text)
        alignment: list[tuple[int, int]] = []
        if attention is not None:
            alignment = hard_alignment(attention, source_tokens, tokens, vocabularies)
            if replace_unk and UNK in ids:
                tokens = copied(attention, ids, tokens, text, vocabularies)
                made = vocabularies.target.joined(tokens)
        entries.append(NBestEntry(one_line(made), tokens, *hypothesis, alignment))
    best = entries[0]
    return Translation(
        best.text, best.score, best.log_probability, best.tokens, best.attention, entries, source_tokens
    )


def is_in_capitals(text: str) -> bool:
    """Returns True if a line of two words or more is all in capitals; a lone acronym is not."""
    return text != text.lower() and text == text.upper() and len(text.split()) > 1


def without_capitals(text: str) -> str:
    """Returns a line in lower case with a capital first letter."""
    small = text.lower()
    at = next((index for index, character in enumerate(small) if character.isalpha()), 0)
    return small[:at] + small[at].upper() + small[at + 1 :]


def with_small_prefix(request: Request) -> Request:
    """Returns a request in capitals with the beginning of its translation, if in capitals too, in lower case."""
    prefix = request.target_prefix
    return request._replace(target_prefix=without_capitals(prefix)) if prefix.isupper() else request


def in_capital_letters(translation: Translation) -> Translation:
    """Returns a translation with its texts in capitals and unchanged tokens."""
    entries = [entry._replace(text=entry.text.upper()) for entry in translation.hypotheses]
    return translation._replace(text=translation.text.upper(), hypotheses=entries)
