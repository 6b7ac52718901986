"""Compilation of requests' constraints into tokens of the target vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from econmt.data.text.glossary import Glossary, Occurrence, occurrences
from econmt.data.text.vocabulary import UNK, Vocabulary
from econmt.decoding.constraints.avoidance import Avoidance
from econmt.decoding.constraints.batch import DecodingConstraints
from econmt.decoding.constraints.inclusion import Phrase, Phrases
from econmt.decoding.constraints.phrases import Spelling
from econmt.decoding.requests import Request, check_request
from econmt.errors import InputError

_KEPT = 256
"""Number of cached lists of avoided phrases; programs send the same list with many lines."""


class ConstraintCompiler:
    """Compiler of requests into constraints of a search; no translation may contain the phrases of ``avoid``."""

    def __init__(
        self, vocabulary: Vocabulary, avoid: Sequence[str] = (), glossary: Glossary | None = None
    ) -> None:
        self._spelling = Spelling(vocabulary)
        self._joins: list[bool] = self._spelling.joins.tolist()
        self._glossary = glossary
        self._everywhere = (Avoidance(avoid, self._spelling),) if avoid else ()
        self._avoidance = lru_cache(_KEPT)(lambda phrases: Avoidance(phrases, self._spelling))

    @property
    def joins(self) -> Tensor:
        """(V,) bool, True for tokens that continue a word."""
        return self._spelling.joins

    def terms(self, request: Request) -> list[Occurrence]:
        """Returns the terms in a request's text of its own glossary and of that for all sentences."""
        glossaries = [each for each in (request.glossary, self._glossary) if each is not None]
        return occurrences(request.text, glossaries)

    def of(
        self,
        request: Request,
        where: str,
        terms: Sequence[Occurrence] | None = None,
        spans: Sequence[Sequence[int]] = (),
    ) -> DecodingConstraints | None:
        """Returns the constraints of a request and of the lists for all sentences, or None if there are none.

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
        if not (texts or avoidances or request.target_prefix):
            return None
        prefix = self._ids(request.target_prefix, f"{where}: target_prefix")
        if any(avoidance.is_in(prefix, goes_on=True) for avoidance in avoidances):
            raise InputError(
                f"{where}: target_prefix {request.target_prefix!r} contains an avoided phrase; remove one of them"
            )
        phrases = []
        for text, what in texts:
            ids = self._ids(text, f"{where}: {what}")
            for avoidance in avoidances:
                if avoidance.is_in(ids):
                    raise InputError(
                        f"{where}: {what} {text!r} contains an avoided phrase; remove one of them"
                    )
            phrases.append(Phrase(ids, self._spelling.ends_word(text)))
        return DecodingConstraints(tuple(phrases), prefix, avoidances, tuple(map(tuple, spans)))

    def satisfies(self, ids: Sequence[int], constraints: DecodingConstraints) -> bool:
        """Returns True if a translation contains all phrases of its constraints."""
        phrases = Phrases(constraints.phrases, self._joins)
        progress = phrases.start
        for token in ids:
            progress = phrases.after(progress, token)
        return phrases.remaining(progress) == 0

    def _ids(self, text: str, what: str) -> tuple[int, ...]:
        ids = self._spelling.encode(text)
        if UNK in ids or (text.strip() and not ids):
            raise InputError(
                f"{what} {text!r} has characters or words that the target vocabulary lacks; remove it"
            )
        return ids
