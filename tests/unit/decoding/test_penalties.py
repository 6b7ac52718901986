"""Penalties against their definition, and searches that end early."""

from __future__ import annotations

import math

import pytest
import torch

from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from tests.unit.decoding.toy import ToyModel, sources

LIMIT = 4
SENTENCES = (0, 1, 2)


def search(model: ToyModel, limit: int = LIMIT, **options: object) -> list[list[Hypothesis]]:
    limits = torch.full((len(SENTENCES),), limit)
    return beam_search(model, *sources(*SENTENCES), limits, SearchOptions(**options))  # type: ignore[arg-type]


def coverage(ids: tuple[int, ...], width: int) -> float:
    """The toy's attention over all but the last position, by its definition."""
    prefix, seen = 0, [0.0] * width
    for token in (2, *ids):
        prefix = prefix * 7 + token + 1
        weights = [prefix % (position + 2) + 1.0 for position in range(width)]
        seen = [total + weight / sum(weights) for total, weight in zip(seen, weights, strict=True)]
    return sum(math.log(min(total, 1.0)) for total in seen[:-1])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize(("brevity", "ratio", "cover"), [(2.0, 1.5, 0.0), (0.0, 1.0, 3.0), (1.0, 2.0, 0.7)])
def test_a_wide_beam_finds_the_best_scores_with_penalties(
    alpha: float, brevity: float, ratio: float, cover: float
) -> None:
    model = ToyModel(4, end_bias=1.0)
    found = search(
        model,
        beam_size=200,
        nbest_size=5,
        length_penalty_alpha=alpha,
        brevity_penalty_weight=brevity,
        brevity_penalty_constant_length_ratio=ratio,
        coverage_penalty_weight=cover,
        attention=False,
    )
    for sentence, hypotheses in zip(SENTENCES, found, strict=True):
        width = sentence % 3 + 2
        scored = [
            (
                total / (len(ids) + 1) ** alpha
                + brevity * min(0.0, 1.0 - ratio * width / (len(ids) + 1))
                + cover * coverage(ids, width),
                list(ids),
            )
            for ids, total in model.everything(sentence, LIMIT)
        ]
        expected = sorted(scored, reverse=True)[:5]
        assert [hypothesis.ids for hypothesis in hypotheses] == [ids for _, ids in expected]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(
            [score for score, _ in expected], abs=1e-5
        )
        best = hypotheses[0]
        assert best.log_probability == pytest.approx(
            model.log_probability(sentence, tuple(best.ids)), abs=1e-5
        )


def test_the_first_whole_translation_may_be_the_last_step() -> None:
    first, every = ToyModel(3), ToyModel(3)
    found = search(first, 10, beam_size=4, beam_search_stop="first")
    best = search(every, 10, beam_size=4)
    assert first.steps < every.steps
    assert all(len(hypotheses) == 1 for hypotheses in found)
    assert all(one[0].score <= other[0].score for one, other in zip(found, best, strict=True))
    assert any(one[0].score < other[0].score for one, other in zip(found, best, strict=True))
    several = ToyModel(3)
    found = search(several, 10, beam_size=4, nbest_size=3, beam_search_stop="first")
    assert several.steps == first.steps, "the others need not have ended"


def test_what_lies_far_behind_is_given_up() -> None:
    rows = []
    for prune in (0.0, 100.0, 1.0, 0.05):
        model = ToyModel(3)
        found = search(model, 10, beam_size=6, nbest_size=6, beam_prune=prune)
        rows.append(sum(model.rows))
        for hypotheses in found:
            assert hypotheses
            assert [each.score for each in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
    assert rows[0] == rows[1] > rows[2] > rows[3]
