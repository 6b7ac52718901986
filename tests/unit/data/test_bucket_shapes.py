"""The shapes of derived buckets cost the least possible, by a formula of a pair's work that counts right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from econmt.config.recipe import load_recipe
from econmt.data.batching import bucket_shapes as module
from econmt.data.batching.bucket_shapes import (
    Derived,
    choose,
    derive_shapes,
    grid_shapes,
    nested_shapes,
    padded_work,
)
from econmt.data.batching.pair_flops import PairFlops, pair_flops
from econmt.model import Implementations, build_model
from econmt_memory.measure.tracker import Tracker

works = st.builds(PairFlops, st.integers(0, 9), st.integers(1, 9), st.integers(0, 3))


@st.composite
def histograms(draw: st.DrawFn, longest: int = 4) -> np.ndarray:
    """Counts of pairs of 1 to ``longest`` positions a side, at least one pair; row and column 0 are of no length."""
    cell = st.tuples(st.integers(1, longest), st.integers(1, longest), st.integers(1, 30))
    cells = st.lists(cell, min_size=1, max_size=8)
    counts = np.zeros((longest + 1, longest + 1), dtype=np.int64)
    for source, target, pairs in draw(cells):
        counts[source, target] += pairs
    filled = np.argwhere(counts).max(axis=0)
    return counts[: filled[0] + 1, : filled[1] + 1]


def cost_of(counts: np.ndarray, shapes: list[tuple[int, int]], work: PairFlops) -> float:
    """PairFlops when each pair goes into the cheapest shape that holds it, pair by pair; infinite if one fits none."""
    total = 0.0
    for source, target in np.argwhere(counts).tolist():
        larger = [(s, t) for s, t in shapes if s >= source and t >= target]
        prices = [work.source * s + work.target * t + work.pair * s * t for s, t in larger]
        total += int(counts[source, target]) * min(prices, default=np.inf)
    return total


@settings(max_examples=60)
@given(histograms(), works, st.integers(1, 4))
def test_no_nested_shapes_cost_less(counts: np.ndarray, work: PairFlops, most: int) -> None:
    found = [tuple(shape) for shape in nested_shapes(counts, Derived(most, work)).tolist()]
    assert 1 <= len(found) <= most
    for smaller, larger in itertools.pairwise(found):
        assert smaller != larger
        assert smaller[0] <= larger[0]
        assert smaller[1] <= larger[1]
    last = counts.shape[0] - 1, counts.shape[1] - 1
    assert found[-1] == last
    cells = itertools.product(range(1, counts.shape[0]), range(1, counts.shape[1]))
    chains = (
        chain
        for chain in itertools.combinations_with_replacement(cells, most - 1)
        if all(a[1] <= b[1] for a, b in itertools.pairwise(chain))  # sorted by source already
    )
    assert cost_of(counts, found, work) == min(cost_of(counts, [*chain, last], work) for chain in chains)


@settings(max_examples=40)
@given(histograms(longest=12), works, st.integers(1, 6))
def test_never_more_work_than_fixed_buckets_of_as_many_shapes(
    counts: np.ndarray, work: PairFlops, width: int
) -> None:
    fixed = grid_shapes(counts, width)
    found = derive_shapes(counts, Derived(len(fixed), work))
    assert len(found) <= len(fixed)
    assert padded_work(counts, found, work) <= padded_work(counts, fixed, work)


def counted(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Counts of pairs by the lengths of their sides."""
    return np.histogram2d(source, target, [range(source.max() + 2), range(target.max() + 2)])[0].astype(int)


@st.composite
def rules(draw: st.DrawFn) -> tuple[np.ndarray, Derived]:
    """Lengths of up to 30 positions that resemble each other, and a rule with a price."""
    size = draw(st.integers(2, 30))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    target = random.integers(1, size + 1, draw(st.integers(1, 3000)))
    source = np.clip(target + random.integers(-5, 6, len(target)), 1, size)
    rule = Derived(draw(st.integers(13, 60)), draw(works), draw(st.integers(1, 2000)))
    return counted(source, target), rule


@settings(max_examples=25)
@given(rules())
def test_shapes_with_a_price_are_worth_it(ruled: tuple[np.ndarray, Derived]) -> None:
    counts, rule = ruled
    found = derive_shapes(counts, rule)
    assert len(np.unique(found, axis=0)) == len(found) <= rule.most
    assert found.tolist() == sorted(found.tolist(), key=lambda shape: shape[::-1])
    twelve = derive_shapes(counts, Derived(12, rule.work))
    if len(found) <= 12:
        assert found.tolist() == twelve.tolist()
    # Each pair goes into some shape, and further shapes save their price together.
    saved = padded_work(counts, twelve, rule.work) - padded_work(counts, found, rule.work)
    assert saved >= (len(found) - len(twelve)) * rule.price


def test_the_number_of_shapes_follows_their_price() -> None:
    draw = np.random.default_rng(4)
    target = draw.integers(1, 61, 20_000)
    source = np.clip(target + draw.integers(-9, 10, 20_000), 1, 60)
    counts, work = counted(source, target), PairFlops(2, 9, 1)
    real = float(sum(counts[s, t] * (2 * s + 9 * t + s * t) for s, t in np.argwhere(counts).tolist()))
    numbers, padded = [], []
    for price in (real, real / 500, real / 5000, 1):
        shapes = derive_shapes(counts, Derived(127, work, int(price)))
        numbers.append(len(shapes))
        padded.append(padded_work(counts, shapes, work) / real - 1)
    assert numbers == [12, 28, 93, 127]
    assert padded == sorted(padded, reverse=True)
    # However many nested shapes there are, sources of one target length differ in length.
    assert 1.5 * padded[-1] < padded_work(counts, nested_shapes(counts, Derived(60, work)), work) / real - 1


def test_lengths_that_have_nothing_to_do_with_each_other_get_a_grid() -> None:
    counts = np.zeros((11, 11), dtype=np.int64)
    counts[np.ix_([5, 10], [5, 10])] = 7
    work = PairFlops(1, 1, 0)
    assert derive_shapes(counts, Derived(4, work)).tolist() == [[5, 5], [10, 5], [5, 10], [10, 10]]
    assert padded_work(counts, nested_shapes(counts, Derived(4, work)), work) > 7 * (10 + 15 + 15 + 20)


def test_many_lengths_are_thinned_and_still_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.exp(np.random.default_rng(2).normal(3, 0.6, (20_000, 2))).astype(int) + 1
    counts = counted(np.append(lengths[:, 0].clip(max=300), 300), np.append(lengths[:, 1].clip(max=260), 260))
    monkeypatch.setattr(module, "_MOST_LENGTHS", 20)
    rule = Derived(5, PairFlops(1, 3, 0))
    few = nested_shapes(counts, rule)
    monkeypatch.setattr(module, "_MOST_LENGTHS", 60)
    more = nested_shapes(counts, rule)
    assert few[-1].tolist() == more[-1].tolist() == [300, 260]
    assert padded_work(counts, more, rule.work) <= padded_work(counts, few, rule.work)
    assert padded_work(counts, few, rule.work) < 1.05 * padded_work(counts, more, rule.work)


def test_shapes_of_the_grid_hold_a_pair_and_pairs_take_the_cheapest() -> None:
    counts = np.zeros((8, 6), dtype=np.int64)
    counts[1, 5] = counts[7, 1] = counts[4, 4] = counts[3, 2] = 1
    assert grid_shapes(counts, 4).tolist() == [[4, 4], [8, 4], [4, 8]]
    found = choose((7, 6), np.array([[4, 2], [2, 4], [5, 5]]), PairFlops(1, 2, 0))
    assert [found[each] for each in ((2, 2), (2, 3), (3, 3), (6, 1))] == [0, 1, 2, -1]


MODELS = {
    "input feeding": (),
    "deep": (
        "model.encoder.layers=3",
        "model.decoder.layers=2",
        "model.encoder.size=96",
        "model.weight_tying=none",
    ),
    "all layers both ways": ("model.encoder.layers=2", "model.encoder.bidirectional=all"),
    "one way": ("model.encoder.layers=2", "model.encoder.bidirectional=none"),
    "whole target": ("model.decoder.input_feeding=false", "model.decoder.layers=2"),
    "low rank": ("model.encoder.rank=7", "model.decoder.rank=5", "model.decoder.layers=2"),
    "dot": ("model.attention.type=dot",),
    "one width": tuple(f"model.{name}=96" for name in ("embedding", "encoder.size", "decoder.size")),
    "bilinear": ("model.attention.type=bilinear", "model.encoder.size=96"),
}
REFERENCE = Implementations.everywhere("reference")
VOCABULARY = 300


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_is_what_is_counted(name: str) -> None:
    recipe = load_recipe("quickstart", MODELS[name])
    model = build_model(recipe, VOCABULARY, VOCABULARY)
    model.train()
    rows = 3
    work = pair_flops(recipe.model, VOCABULARY)

    def counted(source: int, target: int) -> float:
        ids = torch.ones(rows, source, dtype=torch.int64)
        words = torch.ones(rows, target, dtype=torch.int64)
        with Tracker(torch.device("cpu")).recording() as tracker:
            tracker.begin("forward")
            model.loss(ids, torch.full((rows,), source), words, words, implementations=REFERENCE)
        return tracker.flops.total() / rows

    sizes = (10, 10), (20, 10), (10, 20), (20, 20)
    both, longer_source, longer_target, longer = (counted(*each) for each in sizes)
    pair = (longer - longer_source - longer_target + both) / 100
    assert pair == work.pair
    assert (longer_target - both) / 10 - 10 * pair == work.target
    # PyTorch's LSTM is shown a few more inputs, which shut the gates at padding.
    assert 1.0 <= ((longer_source - both) / 10 - 10 * pair) / work.source < 1.07
    # The decoder's first state is made once a sentence, and is not in the formula.
    formula = int(work.of(np.array([50]), np.array([50]))[0])
    assert counted(50, 50) == pytest.approx(formula, rel=0.03)


def test_work_of_pairs_is_that_of_the_formula() -> None:
    found = PairFlops(2, 3, 5).of(np.array([[1], [4]]), np.array([1, 10]))
    assert found.tolist() == [[10, 82], [31, 238]]
    assert found.dtype == np.int64


def test_scaled_numbers_have_the_same_ratios() -> None:
    work = PairFlops(7_864_320, 200_250_624, 2048)
    small = work.scaled()
    assert sum(small) < 1 << 21
    assert small.target / small.source == pytest.approx(work.target / work.source, rel=1e-3)
    assert small.pair / small.source == pytest.approx(work.pair / work.source, rel=0.1)
    assert PairFlops(3, 4, 0).scaled() == PairFlops(3, 4, 0)
