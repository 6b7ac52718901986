"""Sampling: what is drawn how often, and that draws can be repeated."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from econmt.data.text.vocabulary import EOS
from econmt.decoding.search.beam import Hypothesis, SearchOptions
from econmt.decoding.search.sampling import draw, sample, uniform_numbers
from tests.unit.decoding.toy import ToyModel, sources


def drawn(
    model: ToyModel, sentences: list[int], numbers: list[int] | None = None, **options: float
) -> list[list[Hypothesis]]:
    source, lengths = sources(*sentences)
    settings = SearchOptions(**{"sample": 0, **options})  # type: ignore[arg-type]
    return sample(model, source, lengths, torch.full_like(lengths, 3), settings, numbers or sentences)


def all_ids(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.ids for hypothesis in hypotheses] for hypotheses in found]


@pytest.mark.slow
def test_translations_come_as_often_as_they_are_probable() -> None:
    model, count = ToyModel(5), 20_000
    (found,) = drawn(model, [1], nbest_size=count)
    counted = Counter(tuple(hypothesis.ids) for hypothesis in found)
    # PAD and BOS are never drawn, so their share goes to the other tokens of the same step: the expected frequency is
    # the product of the steps' own shares. After three tokens EOS is certain.
    for ids, often in counted.most_common(12):
        prefix, expected = 0, 1.0
        for before, token in zip((2, *ids), (*ids, EOS), strict=True):
            prefix = prefix * 7 + before + 1
            shares = model.table(1, prefix).exp()
            shares[[0, 2]] = 0.0
            expected *= float(shares[token] / shares.sum())
        if len(ids) == 3:
            expected /= float(shares[EOS] / shares.sum())
        error = math.sqrt(expected * (1 - expected) / count)
        assert often / count == pytest.approx(expected, abs=4.5 * error)


def test_log_probabilities_are_the_models_own_whatever_is_drawn_from() -> None:
    model = ToyModel(2)
    for options in ({}, {"temperature": 3.0}, {"sample": 2}):
        (found,) = drawn(model, [0], nbest_size=20, **options)
        for hypothesis in found:
            expected = model.log_probability(0, tuple(hypothesis.ids))
            assert hypothesis.log_probability == pytest.approx(expected, abs=1e-5)
            assert hypothesis.score == pytest.approx(expected / (len(hypothesis.ids) + 1), abs=1e-5)


def test_draws_depend_on_the_sentences_number_and_not_on_its_batch() -> None:
    together = all_ids(drawn(ToyModel(), [0, 1, 2], [10, 11, 12], nbest_size=6))
    assert all_ids(drawn(ToyModel(), [1], [11], nbest_size=6)) == [together[1]]
    assert all_ids(drawn(ToyModel(), [1], [99], nbest_size=6)) != [together[1]]
    # Two sentences that are alike, in one batch, do not share their luck.
    same = all_ids(drawn(ToyModel(), [1, 1], [11, 13], nbest_size=6))
    assert same[0] != same[1]


def test_only_the_top_tokens_are_drawn() -> None:
    log_probs = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().repeat(1000, 1)
    uniform = uniform_numbers(1, 1, 1000, 1)[0]
    counts = torch.bincount(draw(log_probs, uniform, 2, 1.0), minlength=4) / 1000
    assert counts.tolist() == pytest.approx([4 / 7, 0.0, 3 / 7, 0.0], abs=0.06)


def test_a_low_temperature_prefers_the_probable() -> None:
    log_probs = torch.tensor([0.5, 0.3, 0.2]).log().repeat(2000, 1)
    uniform = uniform_numbers(1, 1, 2000, 1)[0]
    cold, hot = (torch.bincount(draw(log_probs, uniform, 0, t), minlength=3) / 2000 for t in (0.25, 100.0))
    assert cold[0] > 0.8
    assert hot.tolist() == pytest.approx([1 / 3] * 3, abs=0.05)


def test_tokens_without_probability_are_never_drawn() -> None:
    log_probs = torch.tensor([[-torch.inf, math.log(0.5), -torch.inf, math.log(0.5), -torch.inf]]).repeat(
        3, 1
    )
    edges = torch.tensor([0.0, 0.5, 1.0 - 2.0**-24], dtype=torch.float64)
    assert draw(log_probs, edges, 0, 1.0).tolist() == [1, 3, 3]


def test_uniform_numbers_are_uniform_and_independent_of_how_many_are_asked_for() -> None:
    numbers = uniform_numbers(7, 3, 50, 200)
    assert numbers.shape == (200, 50)
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.02)
    # A longer limit, as another batch may have, leaves the earlier positions as they are.
    torch.testing.assert_close(uniform_numbers(7, 3, 50, 300)[:200], numbers, rtol=0, atol=0)
