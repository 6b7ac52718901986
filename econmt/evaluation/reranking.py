"""Reranking of n-best lists in Moses' format, by references or by the scores of other models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from sacrebleu.metrics.chrf import CHRF

from econmt.decoding.translator import CHUNK_SIZE
from econmt.errors import InputError
from econmt.evaluation.metrics import sentence_bleu
from econmt.evaluation.scoring import Scorer

_BAR, _BARS = " ||| ", "&#124;" * 3


class RerankCandidate(NamedTuple):
    """Line of an n-best list.

    Attributes:
        number: number of the sentence, from 0. text: the translation. features: field between text and score.
        score: value by which the list is sorted. rest: fields after the score.
    """

    number: int
    text: str
    features: str
    score: float
    rest: str = ""

    @property
    def line(self) -> str:
        """Line in the form that :func:`read_candidate` reads."""
        text = self.text.replace("|||", _BARS)
        return _BAR.join(
            [str(self.number), text, self.features, f"{self.score:.6f}", *filter(None, [self.rest])]
        )


def read_candidate(line: str, where: str) -> RerankCandidate:
    """Reads a line such as ``0 ||| Ein Hund. ||| logprob= -1.2 ||| -0.3``, with or without more fields.

    Raises:
        InputError: the line is not a candidate; the message names ``where``.
    """
    fields = line.split(_BAR)
    try:
        number, text, features, score = int(fields[0]), fields[1], fields[2], float(fields[3])
    except (ValueError, IndexError):
        number, text, features, score = -1, "", "", math.nan
    if number < 0 or not math.isfinite(score):
        raise InputError(
            f"{where}: expected number ||| text ||| features ||| score, as econmt translate --nbest-size writes them"
        )
    return RerankCandidate(number, text.replace(_BARS, "|||"), features, score, _BAR.join(fields[4:]))


def read_lists(lines: Iterable[str], where: str) -> Iterator[list[RerankCandidate]]:
    """Yields the candidates of each sentence; sentences are numbered consecutively from 0.

    Raises:
        InputError: a line is not a candidate, or a number is missing; the message names ``where`` and the line.
    """
    candidates: list[RerankCandidate] = []
    expected = 0
    for number, line in enumerate(lines, 1):
        candidate = read_candidate(line, f"{where}:{number}")
        if candidates and candidate.number == expected + 1:
            yield candidates
            candidates, expected = [], expected + 1
        if candidate.number != expected:
            raise InputError(
                f"{where}:{number}: sentence {candidate.number}, where {expected}"
                f"{' or the next' if candidates else ''} was expected; give the complete list, in order"
            )
        candidates.append(candidate)
    if candidates:
        yield candidates


Judge = Callable[[Sequence[list[RerankCandidate]], int], list[list[float]]]
"""Function from the candidates of consecutive sentences, and the number of the first one, to new scores."""


def by_reference(metric: Literal["bleu", "chrf"], references: Sequence[str], tokenize: str) -> Judge:
    """Returns a judge by sacreBLEU's sentence BLEU (exponential smoothing, effective order) or chrF."""
    sentence_metric = sentence_bleu(tokenize) if metric == "bleu" else CHRF()

    def judge(lists: Sequence[list[RerankCandidate]], first: int) -> list[list[float]]:
        return [
            [
                float(sentence_metric.sentence_score(each.text, [references[number]]).score)
                for each in candidates
            ]
            for number, candidates in enumerate(lists, first)
        ]

    return judge


class WeightedScorer(NamedTuple):
    """Model that scores candidates, with its weight.

    Attributes:
        scorer: scorer of the model. weight: factor of its mean log-probability per token.
        reverse: True if the model translates from the target to the source language.
    """

    scorer: Scorer
    weight: float
    reverse: bool


def by_models(sources: Sequence[str], scorers: Sequence[WeightedScorer]) -> Judge:
    """Returns a judge that adds the weighted scores of models to the scores in the list."""

    def judge(lists: Sequence[list[RerankCandidate]], first: int) -> list[list[float]]:
        pairs = [
            (sources[number], each.text)
            for number, candidates in enumerate(lists, first)
            for each in candidates
        ]
        totals = [each.score for candidates in lists for each in candidates]
        for scorer, weight, reverse in scorers:
            scored_pairs = [(target, source) for source, target in pairs] if reverse else pairs
            for index, scored in enumerate(scorer.score(scored_pairs)):
                totals[index] += weight * scored.log_probability / scored.length
        remaining = iter(totals)
        return [list(islice(remaining, len(candidates))) for candidates in lists]

    return judge


def rerank(
    lists: Iterable[list[RerankCandidate]], judge: Judge, chunk_size: int = CHUNK_SIZE
) -> Iterator[list[RerankCandidate]]:
    """Yields the lists with new scores, best first; candidates of equal scores keep their order."""
    stream, first = iter(lists), 0
    while chunk := list(islice(stream, max(1, chunk_size))):
        for candidates, scores in zip(chunk, judge(chunk, first), strict=True):
            changed = [each._replace(score=score) for each, score in zip(candidates, scores, strict=True)]
            yield sorted(changed, key=lambda each: -each.score)
        first += len(chunk)
