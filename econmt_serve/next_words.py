"""Alternative next words after the beginning of a translation, and the translation's continuation from each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.text.case import upper
from econmt.data.text.vocabulary import BOS, EOS, PAD, UNK, WORD_START
from econmt.decoding.batches import evaluation_mode, pad_sources
from econmt.decoding.constraints.batch import ConstrainedContinuations, DecodingConstraints
from econmt.decoding.constraints.phrases import Spelling
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import beam_search, output_limits
from econmt.decoding.translation import is_in_capitals, one_line, with_small_prefix, without_capitals
from econmt.decoding.translator import Translator

_TRIED = 3
"""Number of first tokens to continue per requested word, because several tokens may begin the same word."""


class NextWord(NamedTuple):
    """A possible next word.

    Attributes:
        probability: probability of its first token after the given beginning.
        text: the translation that the search finds with it.
        score: score of that translation, see :class:`~econmt.decoding.search.beam.Hypothesis`.
    """

    word: str
    probability: float
    text: str
    score: float


class NextWords:
    """Finds next words: continues each of the most probable tokens after a beginning by a search, all in one batch.

    The translator, whose models and search are used, must not sample.
    """

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        target = translator.vocabularies.target
        spelling = Spelling(target)
        pieces = zip(spelling.pieces, spelling.joins.tolist(), strict=True)
        begins = [piece.startswith(WORD_START) or not joins for piece, joins in pieces]
        self._masked = ~torch.tensor(begins)
        self._masked[[PAD, UNK, BOS, EOS]] = True

    def of(self, request: Request, most: int, where: str) -> list[NextWord]:
        """Returns at most ``most`` words after the request's ``target_prefix``, best first; none for a blank sentence.

        Raises:
            InputError: the constraints cannot be satisfied; the message names ``where``.
        """
        translator = self._translator
        spoken, written_in = translator.languages
        in_capitals = translator.options.restore_case and is_in_capitals(request.text, spoken)
        text = without_capitals(request.text, spoken) if in_capitals else request.text
        with_terms = translator.with_terms(request, text)
        source = translator.vocabularies.source.encode(with_terms.text)[: translator.options.max_input_length]
        if not source:
            return []
        prepared = with_small_prefix(request, written_in) if in_capitals else request
        of_terms = with_terms.terms, with_terms.spans
        constraints = translator.constraint_compiler.of(prepared, where, *of_terms)
        with evaluation_mode(translator.models), torch.inference_mode():
            log_probs = self._after(source, constraints.prefix)
            values, tokens = log_probs.topk(min(_TRIED * most, len(log_probs)))
            tried = [
                (constraints._replace(prefix=(*constraints.prefix, token)), value)
                for token, value in zip(tokens.tolist(), values.exp().tolist(), strict=True)
                if value > 0.0
                and not any(
                    each.is_in((*constraints.prefix, token), goes_on=True) for each in constraints.avoidances
                )
            ]
            translations = self._search(source, [each for each, _ in tried]) if tried else []
        at = len(request.target_prefix.split())
        words: dict[str, NextWord] = {}
        for (_, probability), (translation, score) in zip(tried, translations, strict=True):
            text = upper(translation, written_in) if in_capitals else translation
            if len(text.split()) > at:
                word = text.split()[at]
                words.setdefault(word, NextWord(word, probability, text, score))
        return list(words.values())[:most]

    def _after(self, source: Sequence[int], prefix: Sequence[int]) -> Tensor:
        """Returns log-probabilities (V,) of tokens after a prefix, float32 on the CPU; -inf if they begin no word."""
        model, device = self._translator.model, self._translator.device
        state = model.encode(*pad_sources([source], device))
        first = torch.zeros(1, dtype=torch.int64, device=device)
        log_probs, _, state = model.step(torch.full_like(first, BOS), state)
        for token in prefix:
            state = state.select(first, first, 1)
            log_probs, _, state = model.step(torch.full_like(first, token), state)
        return log_probs[0].float().cpu().masked_fill(self._masked, -torch.inf)

    def _search(
        self, source: Sequence[int], constraints: Sequence[DecodingConstraints]
    ) -> list[tuple[str, float]]:
        """Returns text and score of the best translation of source ids for each list of constraints."""
        translator = self._translator
        options = translator.options
        sources, lengths = pad_sources([source] * len(constraints), translator.device)
        limits = output_limits(lengths, options.max_output_factor, translator.max_length)
        chooser = ConstrainedContinuations(constraints, translator.constraint_compiler.joins, options)
        results = beam_search(translator.model, sources, lengths, limits, options, translator.watch, chooser)
        ids = [best[0].ids for best in results]
        texts = translator.vocabularies.target.decode_many(ids)
        return [(one_line(each), best[0].score) for each, best in zip(texts, results, strict=True)]
