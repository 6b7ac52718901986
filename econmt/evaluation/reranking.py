"""N-best lists in Moses' format, put into another order: by a reference, or by what other models think of them."""

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
        number: of the sentence, from 0. text: the translation. features, rest: what stands between text and score, and
            behind it. score: its place in the list follows from it.
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
    """A line such as ``0 ||| Ein Hund. ||| logprob= -1.2 ||| -0.3``, with or without more fields.

    Raises:
        InputError: naming ``where``, if it is none.
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
    """The candidates of each sentence; sentences are numbered from 0, one after the other.

    Raises:
        InputError: naming ``where`` and the line, if one is no candidate, or if a number is missing.
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
    """Scores by sacreBLEU's sentence BLEU (exponential smoothing, effective order) or chrF against references."""
    judge = BLEU(effective_order=True, tokenize=tokenize) if metric == "bleu" else CHRF()

    def judged(lists: Sequence[list[RerankCandidate]], first: int) -> list[list[float]]:
        return [
            [float(judge.sentence_score(each.text, [references[number]]).score) for each in own]
            for number, own in enumerate(lists, first)
        ]

    return judged


class Opinion(NamedTuple):
    """A model that is asked, and how much its mean log-probability of a token counts.

    Attributes:
        scorer: of the model. weight: see above. reverse: whether it translates back.
    """

    scorer: Scorer
    weight: float
    reverse: bool


def by_models(sources: Sequence[str], opinions: Sequence[Opinion]) -> Judge:
    """Adds to the scores in the list what models think of each pair, forwards or backwards."""

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
    """The lists with new scores, best first; equal ones stay in the order in which they came."""
    stream, first = iter(lists), 0
    while chunk := list(islice(stream, max(1, chunk_size))):
        for own, scores in zip(chunk, judge(chunk, first), strict=True):
            changed = [each._replace(score=score) for each, score in zip(own, scores, strict=True)]
            yield sorted(changed, key=lambda each: -each.score)
        first += len(chunk)
