"""The largest batch is the largest: it fits, and one row more does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from econmt.config.recipe import load_recipe
from econmt.engine.precision import NAMED
from econmt.estimate.fit import MOST_ROWS, demand, fit, fit_all, largest_batch
from econmt.estimate.techniques import Technique, estimate
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_memory.measure.ledger import Ledger

SMALL = ("model.embedding=8", "model.encoder.size=16", "model.decoder.size=16", "model.attention.size=8")


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


def test_few_calls_where_bytes_are_linear() -> None:
    calls = []

    def needed(rows: int) -> int:
        calls.append(rows)
        return 400_000_000 + 43_210_000 * rows

    assert largest_batch(needed, 8 << 30, 128, lambda: 400_000_000) == 189
    assert len(calls) <= 4


def test_few_calls_where_bytes_grow_in_steps() -> None:
    calls = []

    def needed(rows: int) -> int:
        calls.append(rows)
        return 400_000_000 + (2 << 20) * (rows * 99_000 // (48 << 20) * 24)

    assert needed(largest_batch(needed, 2 << 30, 128, lambda: 400_000_000) + 1) > 2 << 30
    assert len(calls) <= 20


def test_buckets_tell_where_to_look_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Shape] = []

    def fake(task: TranslationTask, technique: Technique, shape: Shape, device: str, rank: Rank) -> Ledger:
        looks.append(shape)
        each = 900 + 700 * shape.source + 2100 * shape.target + 30 * shape.source * shape.target
        return Ledger(peak=10**6 + each * shape.rows)

    monkeypatch.setattr("econmt.estimate.fit.estimate", fake)
    task = TranslationTask(load_recipe("quickstart", SMALL), 40, 50)
    technique = Technique("reference", Implementations(), NAMED["float32"])
    buckets = [(size, size) for size in range(100, 0, -10)]
    found = list(fit_all(task, technique, buckets, 2 << 30, "cpu", 128))
    assert [fit[:2] for fit in found] == buckets
    for each in found:
        more = fake(task, technique, Shape(each.rows + 1, *each[:2]), "", ALONE).peak
        assert each.bytes <= 2 << 30 < more
    assert len(looks) - len(found) <= 28


def test_buckets_of_one_size_and_none_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(task: TranslationTask, technique: Technique, shape: Shape, device: str, rank: Rank) -> Ledger:
        return Ledger(peak=100 * shape.rows * shape.source)

    monkeypatch.setattr("econmt.estimate.fit.estimate", fake)
    task = TranslationTask(load_recipe("quickstart", SMALL), 40, 50)
    technique = Technique("reference", Implementations(), NAMED["float32"])
    buckets = [(9, 9), (4, 14), (14, 4), (2, 2)]
    assert [fit.rows for fit in fit_all(task, technique, buckets, 1000, "cpu", 64)] == [1, 2, 0, 5]


def test_ends_of_the_range() -> None:
    assert largest_batch(lambda rows: 10 * rows, 9, 64) == 0
    assert largest_batch(lambda rows: 7, 9, 64) == MOST_ROWS
    assert largest_batch(lambda rows: rows, 10**9, 3 * MOST_ROWS) == MOST_ROWS


def test_on_cuda_the_segments_count() -> None:
    assert demand(Ledger(peak=5)) == 5
    assert demand(Ledger(peak=5, allocated=6, reserved=8)) == 8


def test_a_batch_of_the_estimator() -> None:
    task = TranslationTask(load_recipe("quickstart", SMALL), 40, 50)
    technique = Technique("reference", Implementations.everywhere("reference"), NAMED["float32"])

    def needed(rows: int) -> int:
        return demand(estimate(task, technique, Shape(rows, 3, 2), "cpu"))

    budget = needed(300)
    found = fit(task, technique, (3, 2), budget, "cpu", start=200)
    assert found[:2] == (3, 2)
    assert found.rows >= 300
    assert found.bytes == needed(found.rows) <= budget < needed(found.rows + 1)
    none = fit(task, technique, (3, 2), needed(1) - 1, "cpu", start=1)
    assert none == (3, 2, 0, needed(1))


def test_each_batch_is_estimated_once_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Shape, str]] = []

    def fake(task: TranslationTask, technique: Technique, shape: Shape, device: str, rank: Rank) -> Ledger:
        asked.append((shape, device))
        return Ledger(peak=shape.rows, allocated=shape.rows, reserved=1000 + 64 * (shape.rows // 8))

    monkeypatch.setattr("econmt.estimate.fit.estimate", fake)
    task = TranslationTask(load_recipe("quickstart", SMALL), 40, 50)
    technique = Technique("reference", Implementations(), NAMED["float32"])
    found = fit(task, technique, (30, 20), 1000 + 64 * 10, "cuda", start=64)
    assert found == (30, 20, 87, 1640)
    assert len(asked) == len(set(asked))
    assert {(shape.source, shape.target, device) for shape, device in asked} == {(30, 20, "cuda")}
