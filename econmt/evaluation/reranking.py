"""Reranking of n-best lists in Moses' format, by references or by the scores of other models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from econmt.decoding.translator import CHUNK_SIZE
from econmt.errors import InputError
from econmt.evaluation.scoring import Scorer

_BAR, _BARS = " ||| ", "&#124;" * 3


class RerankCandidate(NamedTuple):
    """A line of an n-best list.

    Attributes:
        number: number of the sentence, from 0. text: the translation. features, rest: the fields between text and
            score, and after the score. score: the list is sorted by it.
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
        InputError: The line is no candidate; the message names ``where``.
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
        InputError: A line is no candidate, or a number is missing; the message names ``where`` and the line.
    """
    own: list[RerankCandidate] = []
    expected = 0
    for at, line in enumerate(lines, 1):
        found = read_candidate(line, f"{where}:{at}")
        if own and found.number == expected + 1:
            yield own
            own, expected = [], expected + 1
        if found.number != expected:
            raise InputError(
                f"{where}:{at}: sentence {found.number}, where {expected}{' or the next' if own else ''} was expected; "
                "give the whole list, in order"
            )
        own.append(found)
    if own:
        yield own


Judge = Callable[[Sequence[list[RerankCandidate]], int], list[list[float]]]
"""New scores of the candidates of some sentences, the first of them with this number."""


def by_reference(metric: Literal["bleu", "chrf"], references: Sequence[str], tokenize: str) -> Judge:
    """Returns a judge by sacreBLEU's sentence BLEU (exponential smoothing, effective order) or chrF."""
    judge = BLEU(effective_order=True, tokenize=tokenize) if metric == "bleu" else CHRF()

    def judged(lists: Sequence[list[RerankCandidate]], first: int) -> list[list[float]]:
        return [
            [float(judge.sentence_score(each.text, [references[number]]).score) for each in own]
            for number, own in enumerate(lists, first)
        ]

    return judged


class WeightedScorer(NamedTuple):
    """A model that scores candidates, with its weight.

    Attributes:
        scorer: scorer of the model. weight: factor of its mean log-probability per token. reverse: True if it
            translates from the target to the source language.
    """

    scorer: Scorer
    weight: float
    reverse: bool


def by_models(sources: Sequence[str], opinions: Sequence[WeightedScorer]) -> Judge:
    """Adds the weighted scores of models, forward or reverse, to the scores in the list."""

    def judged(lists: Sequence[list[RerankCandidate]], first: int) -> list[list[float]]:
        pairs = [(sources[number], each.text) for number, own in enumerate(lists, first) for each in own]
        totals = [each.score for own in lists for each in own]
        for scorer, weight, reverse in opinions:
            asked = [(target, source) for source, target in pairs] if reverse else pairs
            for at, scored in enumerate(scorer.score(asked)):
                totals[at] += weight * scored.log_probability / scored.length
        rest = iter(totals)
        return [list(islice(rest, len(own))) for own in lists]

    return judged


def rerank(
    lists: Iterable[list[RerankCandidate]], judge: Judge, chunk_size: int = CHUNK_SIZE
) -> Iterator[list[RerankCandidate]]:
    """Returns the lists with new scores, best first; candidates of equal scores keep their order."""
    stream, first = iter(lists), 0
    while chunk := list(islice(stream, max(1, chunk_size))):
        for own, scores in zip(chunk, judge(chunk, first), strict=True):
            changed = [each._replace(score=score) for each, score in zip(own, scores, strict=True)]
            yield sorted(changed, key=lambda each: -each.score)
        first += len(chunk)
