"""Penalties against their definition, and searches that end early."""

from __future__ import annotations

import pytest

from tests.unit.decoding.toy import ToyModel, assert_best, search


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize(("brevity", "ratio", "cover"), [(2.0, 1.5, 0.0), (0.0, 1.0, 3.0), (1.0, 2.0, 0.7)])
def test_a_wide_beam_finds_the_best_scores_with_penalties(
    alpha: float, brevity: float, ratio: float, cover: float
) -> None:
    model = ToyModel(4, end_bias=1.0)
    options = {
        "beam_size": 200,
        "nbest_size": 5,
        "length_penalty_alpha": alpha,
        "brevity_penalty_weight": brevity,
        "brevity_penalty_constant_length_ratio": ratio,
        "coverage_penalty_weight": cover,
        "attention": False,
    }
    assert_best(search(model, **options), model, **options)


def test_the_first_whole_translation_may_be_the_last_step() -> None:
    first, every = ToyModel(3), ToyModel(3)
    found = search(first, limit=10, beam_size=4, beam_search_stop="first")
    best = search(every, limit=10, beam_size=4)
    assert first.steps < every.steps
    assert all(len(hypotheses) == 1 for hypotheses in found)
    assert all(one[0].score <= other[0].score for one, other in zip(found, best, strict=True))
    assert any(one[0].score < other[0].score for one, other in zip(found, best, strict=True))
    several = ToyModel(3)
    found = search(several, limit=10, beam_size=4, nbest_size=3, beam_search_stop="first")
    assert several.steps == first.steps, "the others need not have ended"


def test_what_lies_far_behind_is_given_up() -> None:
    rows = []
    for prune in (0.0, 100.0, 1.0, 0.05):
        model = ToyModel(3)
        found = search(model, limit=10, beam_size=6, nbest_size=6, beam_prune=prune)
        rows.append(sum(model.rows))
        for hypotheses in found:
            assert hypotheses
            assert [each.score for each in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
    assert rows[0] == rows[1] > rows[2] > rows[3]
