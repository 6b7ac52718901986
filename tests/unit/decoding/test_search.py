"""Beam search against all translations, tried one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from econmt.data.text.vocabulary import BOS, EOS, PAD, UNK
from econmt.decoding.search.beam import SearchOptions, highest, length_penalty, output_limits
from tests.unit.decoding.toy import LIMIT, ToyModel, assert_best, assert_figures, judged, search

PENALTIES = [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 5.0), (2.0, 1.0)]
WIDE: list[dict[str, Any]] = [
    *({"length_penalty_alpha": alpha, "length_penalty_beta": beta} for alpha, beta in PENALTIES),
    {"min_output_length": 2, "unk_penalty": 0.3, "repetition_penalty": 1.3, "word_penalty": 0.1},
    {"ban_unk": True, "length_penalty_alpha": 0.0, "word_penalty": 0.6},
    {"brevity_penalty_weight": 2.0, "brevity_penalty_constant_length_ratio": 1.5},
    {"brevity_penalty_weight": 1.0, "coverage_penalty_weight": 0.7, "length_penalty_alpha": 0.0},
]


@pytest.mark.parametrize("options", WIDE, ids=str)
@pytest.mark.parametrize("end_bias", [-1.0, 1.0])
def test_a_wide_beam_finds_the_best_translations(options: dict[str, Any], end_bias: float) -> None:
    model = ToyModel(end_bias=end_bias)
    options = {"beam_size": 3**LIMIT * 2, "nbest_size": 7, **options}
    assert_best(search(model, **options), model, **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
def test_the_search_stops_early_only_when_nothing_better_can_come(seed: int) -> None:
    # The bound must use the longest length that a hypothesis may still reach, or a long translation that starts badly
    # and goes on almost surely is lost; a strong end bias makes short ones finish first.
    model = ToyModel(seed, end_bias=0.5, spread=3.0)
    for alpha in (0.0, 1.0, 3.0):
        options = {"beam_size": 3**5 * 2, "length_penalty_alpha": alpha}
        assert_best(search(model, limit=5, **options), model, 5, **options)


Ended = tuple[float, float, tuple[int, ...], bool]
"""Score, log-probability, ids, and True if the limit was reached."""
Added = Callable[[tuple[int, ...]], Sequence[float]]


def step_by_step(
    model: ToyModel, sentence: int, limit: int, added: Added = lambda _: (), **named: Any
) -> tuple[list[Ended], list[int]]:
    """The search of one sentence by its definition; returns the n best and the number of rows of each step.

    ``added``: what another model adds to the log-probability of each token and EOS.
    """
    given = SearchOptions(**named)
    limit = max(limit, given.min_output_length)

    def penalty(length: int) -> float:
        beta = given.length_penalty_beta
        return float(((beta + length) / (beta + 1)) ** given.length_penalty_alpha)

    def prefix_of(ids: tuple[int, ...]) -> int:
        number = 0
        for token in (BOS, *ids):
            number = number * (model.size + 1) + token + 1
        return number

    growing: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[Ended] = []
    rows, free = list[int](), given.beam_size
    while growing:
        rows.append(len(growing))
        found = []
        for total, ids in growing:
            values = model.table(sentence, prefix_of(ids)).tolist()
            for token in set(range(model.size)) - {PAD, BOS} - ({UNK} if given.ban_unk else set()):
                if (len(ids) >= limit and token != EOS) or (
                    token == EOS and len(ids) < given.min_output_length
                ):
                    continue
                value = values[token] * (given.repetition_penalty if token in ids else 1.0)
                more = added(ids if token == EOS else (*ids, token))
                value += more[len(ids)] if more else 0.0
                found.append((total + value - (given.unk_penalty if token == UNK else 0.0), (*ids, token)))
        kept = sorted(found, reverse=True)[:free]
        position = len(rows)
        for _, ids in kept:
            if ids[-1] == EOS:
                figures = judged(model, sentence, ids[:-1], added(ids[:-1]), **named)
                assert figures is not None
                ended.append((*figures, ids[:-1], position == limit + 1))
        ended.sort(key=lambda each: -each[0])
        growing = [each for each in kept if each[1][-1] != EOS]
        free -= len(kept) - len(growing)
        worst = ended[given.nbest_size - 1][0] if len(ended) >= given.nbest_size else -math.inf
        if not growing or worst >= growing[0][0] / penalty(limit + 1):
            break
        if ended and given.beam_search_stop == "first":
            break
        if ended and given.beam_prune:
            least = ended[0][0] - given.beam_prune
            growing = [each for each in growing if each[0] / penalty(position) >= least]
    return ended[: given.nbest_size], rows


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    model=st.builds(ToyModel, st.integers(0, 99), st.sampled_from([-2.0, 0.5, 2.0]), st.just(2.0)),
    limits=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    options=st.fixed_dictionaries(
        {},
        optional={
            "length_penalty_alpha": st.sampled_from([0.0, 0.5, 3.0]),
            "length_penalty_beta": st.sampled_from([1.0, 5.0]),
            "beam_search_stop": st.just("first"),
            "beam_prune": st.sampled_from([0.2, 1.0]),
            "min_output_length": st.integers(1, 4),
            "repetition_penalty": st.just(1.6),
            "unk_penalty": st.just(0.8),
            "word_penalty": st.just(0.4),
            "brevity_penalty_weight": st.just(0.7),
            "brevity_penalty_constant_length_ratio": st.just(1.5),
            "coverage_penalty_weight": st.just(0.6),
        },
    ),
)
@example([3, 4], ToyModel(3), [10, 10, 10], {"beam_search_stop": "first"})
@example([2, 5], ToyModel(1), [6, 0, 3], {"ban_unk": True, "beam_prune": 0.5, "min_output_length": 2})
def test_every_step_is_as_the_definition_has_it(
    sizes: list[int], model: ToyModel, limits: list[int], options: dict[str, Any]
) -> None:
    """Narrow beams, several options together, and sentences of several limits: what is found, and when it ends."""
    given = {"nbest_size": sizes[0], "beam_size": sizes[1], **options}
    model.rows.clear()
    found = search(model, [0, 1, 2], limits, **given)
    rows = [0] * len(model.rows)
    for sentence, (limit, hypotheses) in enumerate(zip(limits, found, strict=True)):
        expected, rows_here = step_by_step(model, sentence, limit, **given)
        assert_figures(hypotheses, expected)
        assert [each.cut for each in hypotheses] == [cut for *_, cut in expected]
        for position, count in enumerate(rows_here):
            rows[position] += count
    assert model.rows == rows


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.7, 1.0])
def test_a_length_has_the_same_penalty_wherever_it_is_asked_for(alpha: float) -> None:
    options = SearchOptions(length_penalty_alpha=alpha)
    table = length_penalty(torch.arange(100), options)
    for size in range(2, 30):
        assert torch.equal(length_penalty(torch.arange(size), options), table[:size])
    assert [float(length_penalty(length, options)) for length in range(100)] == table.tolist()


def test_attention_of_steps_and_batches_that_shrink() -> None:
    model = ToyModel(4)
    assert search(model, [0], beam_size=2, attention=False)[0][0].attention is None
    for sentence, hypotheses in enumerate(
        search(model, [0, 1, 2], beam_size=5, nbest_size=5, attention=True)
    ):
        for hypothesis in hypotheses:
            prefix, expected = 0, []
            for token in (2, *hypothesis.ids):
                prefix = prefix * 7 + token + 1
                weights = torch.tensor(
                    [prefix % (position + 2) + 1.0 for position in range(sentence % 3 + 2)]
                )
                expected.append(weights / weights.sum())
            torch.testing.assert_close(hypothesis.attention, torch.stack(expected))
    model = ToyModel(end_bias=1.0)
    search(model, [0, 1, 2, 3, 4, 5], limit=12, beam_size=3)
    assert model.encoded == 1
    # What is known of a sentence is held until a quarter of the sentences have ended, and at the end of few only.
    assert model.held[:2] == [6, 6]
    assert model.held[-1] <= 2
    assert all(4 * after <= 3 * before for before, after in pairwise(model.held) if after != before)

    class Broken(ToyModel):
        def table(self, sentence: int, prefix: int) -> torch.Tensor:
            return torch.full((self.size,), torch.nan)

    assert search(Broken(), [0, 1], beam_size=2) == [[], []]


@pytest.mark.parametrize("width", [7, 1279, 1280, 1287, 1300, 4096])
@pytest.mark.parametrize("count", [1, 5])
def test_the_highest_numbers_are_found_wherever_they_are(width: int, count: int) -> None:
    values = torch.randn(20, width, generator=torch.Generator().manual_seed(width))
    values[1] = -torch.inf
    values[1, width - 1] = 3.0
    values[2] = torch.arange(width)  # neighbours
    values[3] = -torch.arange(width).float()
    values[4] = values[4].round()  # ties
    values[5, :: max(1, width // 80)] += 10.0  # one group holds many of them
    found, where = highest(values, count)
    assert torch.equal(found, values.topk(count, dim=1).values)
    assert torch.equal(values.gather(1, where), found)
    in_order = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    finite = found > -torch.inf
    assert torch.equal(where[finite], in_order[finite])
    assert all(len(set(row)) == count for row in where.tolist())


def test_limits_follow_the_source() -> None:
    lengths = torch.tensor([1, 2, 21, 61])
    assert output_limits(lengths, 2.0).tolist() == [10, 12, 50, 130]
    assert output_limits(lengths, 1.5).tolist() == [10, 11, 40, 100]
    # Beyond the longest training sentence (20 tokens) there is a ceiling, but never one below the source's length.
    assert output_limits(lengths, 2.0, longest=20).tolist() == [10, 12, 50, 70]
    assert output_limits(torch.tensor([31]), 2.0, longest=20).tolist() == [50]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size"),
        ({"beam_size": 3, "nbest_size": 4}, "nbest_size"),
        ({"length_penalty_alpha": -1.0}, "length_penalty_alpha"),
        ({"length_penalty_beta": -0.5}, "length_penalty_beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"max_output_factor": 0.0}, "max_output_factor"),
        ({"sample": -1}, "sample"),
        ({"sample": 0, "top_p": 0.0}, "top_p\n.*greater than 0"),
        ({"repetition_penalty": 0.5}, "repetition_penalty\n.*greater than or equal to 1"),
        ({"attention": False, "replace_unk": True}, "replace_unk"),
        ({"sample": 0, "block_ngram_repeat": 2}, "block_ngram_repeat"),
        ({"ban_unk": True, "unk_penalty": 1.0}, "ban_unk: true cannot be combined with unk_penalty: 1.0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchOptions(**options)  # type: ignore[arg-type]
