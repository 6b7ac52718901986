"""Least length, unknown words and repetitions against their definitions, by trying all translations of a toy model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from econmt.data.text.vocabulary import EOS, UNK
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.sampling import draw, sample, uniform_numbers
from tests.unit.decoding.toy import WORDS, ToyModel, sources

LIMIT = 4
SENTENCES = (0, 1, 2)
CASES: list[dict[str, Any]] = [
    {"min_output_length": 3},
    {"ban_unk": True},
    {"unk_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"word_penalty": 0.6},
    {"min_output_length": 2, "unk_penalty": 0.3, "repetition_penalty": 1.3, "word_penalty": 0.1},
]


def search(model: ToyModel, limit: int = LIMIT, **options: Any) -> list[list[Hypothesis]]:
    limits = torch.full((len(SENTENCES),), limit)
    return beam_search(model, *sources(*SENTENCES), limits, SearchOptions(attention=False, **options))


def judged(
    model: ToyModel, sentence: int, ids: tuple[int, ...], **options: Any
) -> tuple[float, float] | None:
    """Score and log-probability of a translation by definition; None if it is not allowed."""
    given = SearchOptions(**options)
    if len(ids) < given.min_output_length or (given.ban_unk and UNK in ids):
        return None
    prefix, before = 0, 2
    real = changed = 0.0
    for position, token in enumerate((*ids, EOS)):
        prefix = prefix * 7 + before + 1
        value = float(model.table(sentence, prefix)[token])
        real += value
        value *= given.repetition_penalty if token in ids[:position] else 1.0
        changed += value - (given.unk_penalty if token == UNK else 0.0)
        before = token
    length = len(ids) + 1
    return changed / length**given.length_penalty_alpha - given.word_penalty * length, real


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_wide_beam_finds_the_best_of_all_translations(case: dict[str, Any], alpha: float) -> None:
    model = ToyModel(4, end_bias=1.0)
    options = {**case, "length_penalty_alpha": alpha}
    found = search(model, beam_size=200, nbest_size=5, **options)
    everything = [ids for length in range(LIMIT + 1) for ids in product(WORDS, repeat=length)]
    for sentence, hypotheses in zip(SENTENCES, found, strict=True):
        scored = [(judged(model, sentence, ids, **options), list(ids)) for ids in everything]
        best = sorted(((*figures, ids) for figures, ids in scored if figures), reverse=True)[:5]
        assert [each.ids for each in hypotheses] == [ids for _, _, ids in best]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _, _ in best], abs=1e-5)
        assert [each.log_probability for each in hypotheses] == pytest.approx(
            [real for _, real, _ in best], abs=1e-5
        )


def test_results_do_not_depend_on_the_batch() -> None:
    model, case = ToyModel(7, end_bias=-0.5), CASES[-1]
    together = search(model, beam_size=3, nbest_size=2, **case)
    for number, sentence in enumerate(SENTENCES):
        alone = beam_search(
            model,
            *sources(sentence),
            torch.tensor([LIMIT]),
            SearchOptions(attention=False, beam_size=3, nbest_size=2, **case),
        )
        assert [each[:3] for each in alone[0]] == [each[:3] for each in together[number]]


def test_the_least_length_moves_the_limit() -> None:
    for found in search(ToyModel(1, end_bias=5.0), limit=1, min_output_length=6, beam_size=3):
        assert [len(each.ids) for each in found] == [6]
        assert found[0].cut


def test_the_least_length_moves_the_limit_of_draws() -> None:
    options = SearchOptions(sample=0, nbest_size=3, min_output_length=6, attention=False)
    for found in sample(
        ToyModel(1, end_bias=5.0), *sources(*SENTENCES), torch.ones(3, dtype=torch.int64), options, [1, 2, 3]
    ):
        assert [len(each.ids) for each in found] == [6, 6, 6]
        assert all(each.cut for each in found)


def test_draws_keep_to_the_changes_and_have_the_scores_of_the_model() -> None:
    model = ToyModel(3, end_bias=1.0)
    options = SearchOptions(
        sample=0, nbest_size=40, min_output_length=2, ban_unk=True, repetition_penalty=2.0, attention=False
    )
    drawn = sample(model, *sources(*SENTENCES), torch.full((3,), LIMIT), options, [1, 2, 3])
    for sentence, hypotheses in zip(SENTENCES, drawn, strict=True):
        for each in hypotheses:
            assert len(each.ids) >= 2
            assert UNK not in each.ids
            _, real = judged(model, sentence, tuple(each.ids)) or (0.0, 0.0)
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
