"""Translation of paragraphs, one per line, sentence by sentence.

Sentences are split by sentence-splitter (the extra ``sentences``), the splitter of Moses and Europarl: rules with a
list of abbreviations for each of some twenty languages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from econmt.decoding.requests import Request
from econmt.decoding.translation import EMPTY, Translation
from econmt.decoding.translator import Translator
from econmt.errors import InputError

_SPACELESS = ("zh", "ja", "th", "lo", "km", "my", "bo", "yue", "cmn")
"""Languages without spaces between sentences."""

Split = Callable[[str], list[str]]


def sentence_splitter(language: str) -> Split:
    """Returns a function that splits a paragraph into its sentences; only ``en`` of the language ``en-US`` is used.

    Raises:
        InputError: The library is not installed, or does not know the language.
    """
    try:
        from sentence_splitter import SentenceSplitter, SentenceSplitterException
    except ImportError:
        raise InputError(
            "--split-sentences needs sentence-splitter, which is not installed; run pip install sentence-splitter, or "
            "give one sentence per line"
        ) from None
    code = language.lower().replace("_", "-").partition("-")[0]
    try:
        splitter = SentenceSplitter(language=code)
    except SentenceSplitterException:
        raise InputError(
            f"--split-sentences: sentence-splitter has no rules for the source language {language!r}; give one "
            "sentence per line"
        ) from None
    return lambda text: [part for part in splitter.split(text) if part.strip()]


class ParagraphTranslator:
    """Translates lines of several sentences.

    Args:
        translator: translator of sentences; the best translation of each is used.
        split: see :func:`sentence_splitter`.
        target: code of the target language, which decides if sentences are separated by blanks.
    """

    def __init__(self, translator: Translator, split: Split, target: str) -> None:
        self._translator, self._split = translator, split
        self._between = "" if target.lower().replace("_", "-").partition("-")[0] in _SPACELESS else " "

    def translate_chunk(
        self, lines: Sequence[Request], first: int, where: str, done: Callable[[int], object] = lambda _: None
    ) -> list[Translation]:
        """Translates lines as :meth:`Translator.translate_chunk`; lines cannot have constraints.

        Returns:
            For each line its text, tokens and the sum of its log-probabilities, which is its score too.

        Raises:
            InputError: A line has constraints.
        """
        for number, request in enumerate(lines, first):
            if request.factors or not request.is_plain:
                raise InputError(
                    f"{where}:{number}: constraints and source factors apply to single sentences and cannot be "
                    "combined with --split-sentences; remove them, or give one sentence per line"
                )
        parts = [self._split(request.text) for request in lines]
        numbers = [number for number, sentences in enumerate(parts, first) for _ in sentences]
        translations = iter(
            self._translator.translate_chunk(
                [sentence for sentences in parts for sentence in sentences], first, where, numbers=numbers
            )
        )
        done(len(lines))
        return [self._joined(translations, len(sentences)) for sentences in parts]

    def _joined(self, translations: Iterator[Translation], count: int) -> Translation:
        parts = [next(translations) for _ in range(count)]
        if not parts:
            return EMPTY
        total = math.fsum(each.log_probability for each in parts)
        return Translation(
            self._between.join(each.text for each in parts if each.text),
            total,
            total,
            [token for each in parts for token in each.tokens],
            None,
            [],
            [token for each in parts for token in each.source_tokens],
        )
