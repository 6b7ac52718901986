"""The largest batch is the largest, and plans fit a small GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from econmt.budget.planner import Planner, estimator, usable
from econmt.budget.prices import settings
from econmt.config.recipe import load_recipe
from econmt.data.batching.batches import BatchShape
from econmt.engine.machine import total_memory
from econmt.engine.precision import NAMED, precision_of
from econmt.estimate.byte_budget import AUTO_SHARE
from econmt.estimate.fit import MOST_ROWS, demand, fit_all, largest_batch
from econmt.estimate.techniques import Technique, estimate
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_memory.measure.ledger import Ledger
from econmt_ops.backends.triton import partition as division
from econmt_ops.backends.triton.partition import Partition
from econmt_ops.dispatch.device_limits import limits_of
from tests.ops.simulated_gpu import simulated_gpu

SMALL = ("model.embedding=8", "model.encoder.size=16", "model.decoder.size=16", "model.attention.size=8")


TASK = TranslationTask(load_recipe("quickstart", SMALL), 40, 50)
TECHNIQUE = Technique("reference", Implementations(), NAMED["float32"])
Asked = list[tuple[Shape, str]]
Play = Callable[[Callable[[Shape], Ledger]], Asked]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Puts a function in the place of estimates; returns what shapes and devices it is asked for."""

    def use(ledger: Callable[[Shape], Ledger]) -> Asked:
        asked: Asked = []

        def estimate(_task: object, _technique: object, shape: Shape, device: str, _rank: object) -> Ledger:
            asked.append((shape, device))
            return ledger(shape)

        monkeypatch.setattr("econmt.estimate.fit.estimate", estimate)
        return asked

    return use


@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(1, 10**4),
    bend=st.integers(0, 50),
    step=st.integers(1, 5000),
    start=st.integers(1, 10**5),
    rows=st.integers(0, 3 * 10**4),
)
def test_agrees_with_the_definition(
    fixed: int, slope: int, bend: int, step: int, start: int, rows: int
) -> None:
    """Linear, bent upwards, and in steps as those of an allocator."""

    def needed(count: int) -> int:
        exact = fixed + slope * count + slope * max(0, count - 1000) * bend // 10
        return -(-exact // step) * step

    calls = []

    def counted(count: int) -> int:
        calls.append(count)
        return needed(count)

    budget = needed(rows) if rows else needed(1) - 1
    found = largest_batch(counted, budget, start, lambda: fixed)
    assert found >= rows
    assert found == 0 or needed(found) <= budget
    assert needed(found + 1) > budget
    assert len(calls) == len(set(calls))
    assert len(calls) < 35


@pytest.mark.parametrize(
    ("each", "budget", "most_calls"),
    [
        (lambda rows: 43_210_000 * rows, 8 << 30, 4),
        (lambda rows: (2 << 20) * (rows * 99_000 // (48 << 20) * 24), 2 << 30, 20),
    ],
    ids=["linear", "in steps"],
)
def test_few_calls_are_enough(each: Callable[[int], int], budget: int, most_calls: int) -> None:
    calls: list[int] = []

    def needed(rows: int) -> int:
        calls.append(rows)
        return 400_000_000 + each(rows)

    found = largest_batch(needed, budget, 128, lambda: 400_000_000)
    assert len(calls) <= most_calls
    assert needed(found) <= budget < needed(found + 1)


def test_buckets_tell_where_to_look_in_the_next(play: Play) -> None:
    def ledger(shape: Shape) -> Ledger:
        each = 900 + 700 * shape.source + 2100 * shape.target + 30 * shape.source * shape.target
        return Ledger(peak=10**6 + each * shape.rows)

    looks, buckets = play(ledger), [(size, size) for size in range(100, 0, -10)]
    found = list(fit_all(TASK, TECHNIQUE, buckets, 2 << 30, "cpu", 128))
    assert [fit[:2] for fit in found] == buckets
    for each in found:
        assert each.bytes <= 2 << 30 < ledger(Shape(each.rows + 1, *each[:2])).peak
    assert len(looks) <= 28


def test_buckets_of_one_size_and_none_that_fits(play: Play) -> None:
    play(lambda shape: Ledger(peak=100 * shape.rows * shape.source))
    buckets = [(9, 9), (4, 14), (14, 4), (2, 2)]
    assert [fit.rows for fit in fit_all(TASK, TECHNIQUE, buckets, 1000, "cpu", 64)] == [1, 2, 0, 5]


def test_ends_of_the_range() -> None:
    assert largest_batch(lambda rows: 10 * rows, 9, 64) == 0
    assert largest_batch(lambda rows: 7, 9, 64) == MOST_ROWS
    assert largest_batch(lambda rows: rows, 10**9, 3 * MOST_ROWS) == MOST_ROWS
    assert demand(Ledger(peak=5)) == 5
    assert demand(Ledger(peak=5, allocated=6, reserved=8)) == 8, "on a GPU segments count"


def test_a_batch_of_the_estimator() -> None:
    technique = TECHNIQUE._replace(implementations=Implementations.everywhere("reference"))

    def needed(rows: int) -> int:
        return demand(estimate(TASK, technique, Shape(rows, 3, 2), "cpu"))

    budget = needed(300)
    found = next(fit_all(TASK, technique, [(3, 2)], budget, "cpu", start=200))
    assert found[:2] == (3, 2)
    assert found.rows >= 300
    assert found.bytes == needed(found.rows) <= budget < needed(found.rows + 1)
    none = next(fit_all(TASK, technique, [(3, 2)], needed(1) - 1, "cpu", start=1))
    assert none == (3, 2, 0, needed(1))


def test_each_batch_is_estimated_once_for_its_device(play: Play) -> None:
    asked = play(lambda s: Ledger(peak=s.rows, allocated=s.rows, reserved=1000 + 64 * (s.rows // 8)))
    assert next(fit_all(TASK, TECHNIQUE, [(30, 20)], 1640, "cuda", start=64)) == (30, 20, 87, 1640)
    assert len(asked) == len(set(asked))
    assert {(shape.source, shape.target, device) for shape, device in asked} == {(30, 20, "cuda")}


GPU = torch.device("cuda", 0)
CARD: dict[str, Any] = {"capability": (8, 9), "multiprocessors": 24, "memory": 8 << 30}
WORKLOADS = {
    "multi30k": (6000, 6000, BatchShape(21, 22, 64, 64)),
    "student": (8000, 8000, BatchShape(50, 50, 128, 128)),
    "iwslt": (17_191, 7_709, BatchShape(100, 100, 128, 128)),  # Echo's model and batch
    "gnmt": (32_000, 32_000, BatchShape(25, 25, 4096, 4096)),
}
"""Vocabularies and largest batch by recipe."""
PARTS = {"multi30k": 1, "student": 1, "iwslt": 1, "gnmt": 2}
"""Micro-batches, at least, of a batch by recipe."""
PERSISTENT = {"multi30k": {256}, "iwslt": {256}, "student": set(), "gnmt": set()}
"""Units of the LSTM layers that are small enough for persistent launches, by recipe."""


@pytest.mark.parametrize(
    "name",
    ["multi30k", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("student", "iwslt", "gnmt"))],
)
def test_recipes_fit_8_gb_with_kernels_that_fit_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    partitions: list[tuple[int, bool, Partition]] = []
    divide = division.divide

    def watched(batch: int, hidden: int, *others: Any, back: bool, **options: Any) -> Partition | None:
        found = divide(batch, hidden, *others, back=back, **options)
        if found is not None:
            partitions.append((hidden, back, found))
        return found

    monkeypatch.setattr(division, "divide", watched)
    recipe = load_recipe(name)
    *sizes, shape = WORKLOADS[name]
    task = TranslationTask(recipe, *sizes)
    with simulated_gpu(**CARD):
        budget = int(AUTO_SHARE * total_memory(GPU))
        assert budget == int(0.9 * 8 * 2**30)
        peak = estimator(task, "cuda", precision_of("auto", GPU))
        choices = settings(Implementations.of(recipe.ops), "cuda")
        (found,) = Planner([shape], choices, budget, peak, accumulating=False, width=8).allot()
        limits = limits_of(GPU)
    assert found.parts >= PARTS[name]
    assert found.rows * found.parts >= shape.rows
    assert 0 < found.peak <= usable(budget)
    assert {hidden for hidden, _, _ in partitions} == PERSISTENT[name]
    for hidden, back, partition in partitions:
        terms, outputs = (4 * hidden, partition.units) if back else (hidden, 4 * partition.units)
        assert partition.parts(hidden) <= partition.programs <= limits.multiprocessors == 24
        assert partition.shared(terms, outputs, 2) <= limits.shared == 101_376
        assert partition.split == 1
