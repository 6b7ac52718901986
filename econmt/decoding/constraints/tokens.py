"""Compilation of requests' constraints into tokens of the target vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from econmt.config.yaml_reader import shortened
from econmt.data.text.glossary import Glossary, Occurrence, occurrences
from econmt.data.text.vocabulary import UNK, Vocabulary
from econmt.decoding.constraints.avoidance import Avoidance
from econmt.decoding.constraints.batch import DecodingConstraints
from econmt.decoding.constraints.inclusion import Phrase, contains_all
from econmt.decoding.constraints.phrases import Spelling
from econmt.decoding.requests import Request, check_request
from econmt.errors import InputError

_KEPT = 256
"""Number of cached lists of avoided phrases; programs send the same list with many lines."""


class ConstraintCompiler:
    """Compiler of requests into constraints of a search.

    Args:
        vocabulary: target vocabulary. avoid: phrases that no translation may contain.
        glossary: terms for all sentences. language: code of the source language, by which terms are found.

    Raises:
        InputError: The vocabulary cannot write the translation of a term, or ``avoid`` rules it out; the message names
            the term with its file and line.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        avoid: Sequence[str] = (),
        glossary: Glossary | None = None,
        language: str = "",
    ) -> None:
        self._language = language
        self._spelling = Spelling(vocabulary)
        self._glossary = glossary
        self._everywhere = (Avoidance(avoid, self._spelling),) if avoid else ()
        self._avoidance = lru_cache(_KEPT)(lambda phrases: Avoidance(phrases, self._spelling))
        if glossary is not None:
            for source, target in glossary.terms.items():
                self._phrase(target, glossary.name_of(source), self._everywhere)

    @property
    def joins(self) -> Tensor:
        """(V,) bool, True for tokens that continue a word."""
        return self._spelling.joins

    def terms(self, request: Request) -> list[Occurrence]:
        """Returns the terms in a request's text of its own glossary and of that for all sentences."""
        glossaries = [each for each in (request.glossary, self._glossary) if each is not None]
        return occurrences(request.text, glossaries, self._language)

    def of(
        self,
        request: Request,
        where: str,
        terms: Sequence[Occurrence] | None = None,
        spans: Sequence[Sequence[int]] = (),
    ) -> DecodingConstraints:
        """Returns the constraints of a request and of the lists for all sentences.

        Args:
            request: the request. where: its name in messages.
            terms: terms whose translations are constraints; None: all in the text.
            spans: source positions of each term; empty: unknown.

        Raises:
            InputError: The vocabulary cannot write a phrase, or a phrase is also avoided; the message names ``where``.
        """
        check_request(request, where)
        terms = self.terms(request) if terms is None else terms
        texts = [(each.target, "the glossary's translation") for each in terms]
        texts += [(text, "the constraint") for text in request.constraints]
        avoidances = self._everywhere
        if request.avoid:
            avoidances = (*avoidances, self._avoidance(tuple(request.avoid)))
        name = f"{where}: target_prefix {shortened(request.target_prefix)!r}"
        prefix = self._ids(request.target_prefix, name)
        if any(avoidance.is_in(prefix, goes_on=True) for avoidance in avoidances):
            raise InputError(f"{name} contains an avoided phrase; remove one of them")
        named = [(text, f"{where}: {what} {shortened(text)!r}") for text, what in texts]
        phrases = tuple(self._phrase(text, name, avoidances) for text, name in named)
        return DecodingConstraints(phrases, prefix, avoidances, tuple(map(tuple, spans)))

    def satisfies(self, ids: Sequence[int], constraints: DecodingConstraints) -> bool:
        """Returns True if a translation satisfies its constraints as text, whatever its segmentation into tokens."""
        if any(avoidance.is_in(ids) for avoidance in constraints.avoidances):
            return False
        phrases = (self._spelling.text_of(phrase.ids) for phrase in constraints.phrases)
        return contains_all(self._spelling.text_of(ids), list(filter(None, phrases)))

    def _phrase(self, text: str, name: str, avoidances: Sequence[Avoidance]) -> Phrase:
        """Returns the phrase of a text that does not contain avoided ones; errors begin with ``name``."""
        ids = self._ids(text, name)
        if any(avoidance.is_in(ids) for avoidance in avoidances):
            raise InputError(f"{name} contains an avoided phrase; remove one of them")
        return Phrase(ids, self._spelling.ends_word(text))

    def _ids(self, text: str, name: str) -> tuple[int, ...]:
        ids = self._spelling.encode(text)
        if UNK in ids or (text.strip() and not ids):
            raise InputError(f"{name} has characters or words that the target vocabulary lacks; remove it")
        return ids
