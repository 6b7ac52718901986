"""Least length, unknown words, repetitions and penalties against their definitions, by trying all translations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from econmt.data.text.vocabulary import UNK
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.sampling import draw, sample, uniform_numbers
from tests.unit.decoding import toy

SENTENCES = (0, 1, 2)
CASES: list[dict[str, Any]] = [
    {"min_output_length": 3},
    {"ban_unk": True},
    {"unk_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"word_penalty": 0.6},
    {"min_output_length": 2, "unk_penalty": 0.3, "repetition_penalty": 1.3, "word_penalty": 0.1},
]

NAMES = ("brevity_penalty_weight", "brevity_penalty_constant_length_ratio", "coverage_penalty_weight")
PENALTIES = [
    dict(zip(NAMES, each, strict=True)) for each in ((2.0, 1.5, 0.0), (0.0, 1.0, 3.0), (1.0, 2.0, 0.7))
]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("case", [*CASES, *PENALTIES], ids=str)
def test_a_wide_beam_finds_the_best_of_all_translations(case: dict[str, Any], alpha: float) -> None:
    model = toy.ToyModel(4, end_bias=1.0)
    options = {"beam_size": 200, "nbest_size": 5, "attention": False, "length_penalty_alpha": alpha, **case}
    toy.assert_best(toy.search(model, **options), model, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_do_not_depend_on_the_batch(case: dict[str, Any]) -> None:
    options = {"attention": False, "beam_size": 3, "nbest_size": 2, **case}
    toy.assert_alone_as_together(toy.ToyModel(7, end_bias=-0.5), SENTENCES, [toy.LIMIT] * 3, 0.0, **options)


def test_the_least_length_moves_the_limit_of_draws() -> None:
    options = SearchOptions(sample=0, nbest_size=3, min_output_length=6, attention=False)
    for found in sample(
        toy.ToyModel(1, end_bias=5.0),
        *toy.sources(*SENTENCES),
        torch.ones(3, dtype=torch.int64),
        options,
        [1, 2, 3],
    ):
        assert [len(each.ids) for each in found] == [6, 6, 6]
        assert all(each.cut for each in found)


def test_draws_keep_to_the_changes_and_have_the_scores_of_the_model() -> None:
    model = toy.ToyModel(3, end_bias=1.0)
    options = SearchOptions(
        sample=0, nbest_size=40, min_output_length=2, ban_unk=True, repetition_penalty=2.0, attention=False
    )
    drawn = sample(model, *toy.sources(*SENTENCES), torch.full((3,), toy.LIMIT), options, [1, 2, 3])
    for sentence, hypotheses in zip(SENTENCES, drawn, strict=True):
        for each in hypotheses:
            assert len(each.ids) >= 2
            assert UNK not in each.ids
            _, real = toy.judged(model, sentence, tuple(each.ids)) or (0.0, 0.0)
            assert each.log_probability == pytest.approx(real, abs=1e-5)
            assert each.score == pytest.approx(real / (len(each.ids) + 1), abs=1e-5)


def test_top_p_draws_from_the_fewest_tokens_that_reach_the_share() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])
    uniform = uniform_numbers(1, 1, 1, 2000)[:, 0]
    rows = probabilities.log().expand(2000, 5)
    for share, kept in ((0.4, [1]), (0.41, [1, 3]), (0.7, [1, 3]), (0.8, [1, 3, 4]), (1.0, [0, 1, 2, 3, 4])):
        tokens = draw(rows, uniform, 0, 1.0, share)
        assert sorted(set(tokens.tolist())) == kept, share
        counts = torch.bincount(tokens, minlength=5)[kept] / 2000
        expected = probabilities[0, kept] / probabilities[0, kept].sum()
        torch.testing.assert_close(counts, expected.float(), atol=0.04, rtol=0.0)
    assert set(draw(rows, uniform, 2, 1.0, 0.5).tolist()) == {1}  # 0.4 of 0.7
    assert set(draw(rows, uniform, 2, 1.0, 0.6).tolist()) == {1, 3}
