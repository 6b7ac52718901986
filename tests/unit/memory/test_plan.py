"""A plan keeps every step within the budget, at the least cost, and refuses only what cannot be done."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import reduce
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from econmt.budget import planner as planner_module
from econmt.budget.peaks import PeakModel
from econmt.budget.planner import (
    RESERVE,
    BatchBudget,
    MemoryPlan,
    Planner,
    describe,
    estimator,
    plan_table,
    usable,
)
from econmt.budget.prices import PRICES, settings
from econmt.config.recipe import Recipe, load_recipe
from econmt.config.section import KeyMark, marked_keys
from econmt.config.yaml_reader import leaves, parse_size
from econmt.data.batching.batches import Batch, BatchShape, pad_batch
from econmt.decoding.search.beam import SearchOptions, beam_search, output_limits
from econmt.engine.precision import NAMED
from econmt.errors import InputError
from econmt.estimate import byte_budget as budgets
from econmt.estimate.beam_search import estimate_search, search_rows
from econmt.estimate.byte_budget import AUTO_SHARE, budget_bytes, group_memory, nearest_budget, size_text
from econmt.model import Implementations, IncrementalModel, build_model
from econmt.tasks.protocol import Shape
from econmt_memory.measure.tracker import Tracker

AUTO = Implementations()
LEAN = Implementations.everywhere("recompute", "least")
LADDER = [AUTO, Implementations(decoder="recompute"), LEAN]
OUTSIDE = 50_000_000
"""Bytes of a recipe's budget that are not for tensors."""
CPU = torch.device("cpu")


class Phase(NamedTuple):
    """Bytes alive in a phase of a step: fixed + rows (a + b source + c target + d source target)."""

    fixed: int
    coefficients: tuple[int, int, int, int]

    def bytes(self, shape: Shape) -> int:
        rows, source, target = shape
        a, b, c, d = self.coefficients
        return self.fixed + rows * (a + b * source + c * target + d * source * target)


def peak_of(phases: list[Phase], shape: Shape) -> int:
    return max(phase.bytes(shape) for phase in phases)


COEFFICIENTS = st.tuples(*[st.integers(0, 50)] * 4)
PHASES = st.lists(st.builds(Phase, st.integers(1000, 9000), COEFFICIENTS), min_size=1, max_size=3)
SHAPE = st.builds(BatchShape, *(st.integers(1, most) for most in (100, 100, 200, 9)))
SHAPES = st.lists(SHAPE, min_size=1, max_size=6, unique_by=lambda shape: shape[:2])


@given(phases=PHASES, largest=st.builds(Shape, *[st.integers(1, 120)] * 3), data=st.data())
def test_what_is_told_of_a_shape_is_never_too_little(
    phases: list[Phase], largest: Shape, data: st.DataObject
) -> None:
    peaks = PeakModel(lambda shape: peak_of(phases, shape), largest)
    shape = Shape(*(data.draw(st.integers(1, most)) for most in largest))
    told = peaks(shape)
    assert peak_of(phases, shape) <= told <= peaks(largest) == peaks.most
    assert peaks.check(shape)
    assert peaks(shape) == told
    limit = data.draw(st.integers(0, 2 * told))
    rows = peaks.rows(shape.source, shape.target, limit)
    assert 0 <= rows <= largest.rows
    if rows:
        assert peaks(shape._replace(rows=rows)) <= limit + 1
    if rows < largest.rows:
        assert peaks(shape._replace(rows=rows + 1)) > limit


def test_peaks_that_were_raised_leave_less_room_for_rows() -> None:
    """The estimate of one row is 50 bytes more than the line between the largest shape and the smallest."""
    largest = Shape(10, 10, 10)

    def estimate(shape: Shape) -> int:
        return 10 * shape.rows + (50 if shape == Shape(5, 10, 10) else 0)

    peaks = PeakModel(estimate, largest)
    assert peaks.rows(10, 10, 100) == 10
    assert not peaks.check(Shape(5, 10, 10))
    rows = peaks.rows(10, 10, 100)
    assert 0 < rows < 10
    assert peaks(Shape(rows, 10, 10)) <= 100


def test_along_the_diagonal_one_phase_is_told_exactly() -> None:
    phase = Phase(5000, (0, 30, 70, 0))
    peaks = PeakModel(phase.bytes, Shape(64, 40, 80))
    for part in (1, 2, 10, 20, 39):
        shape = Shape(16, part, 2 * part)
        assert phase.bytes(shape) <= peaks(shape) <= 1.03 * phase.bytes(shape)


def test_few_estimates_are_enough() -> None:
    seen = []

    def estimate(shape: Shape) -> int:
        seen.append(shape)
        return Phase(1000, (1, 1, 1, 1)).bytes(shape)

    peaks = PeakModel(estimate, Shape(128, 100, 100))
    assert peaks.most
    assert seen == [(128, 100, 100)]
    for rows in range(1, 100):
        peaks(Shape(rows, rows, 7))
    assert sorted(seen[1:]) == [(1, 2, 2), (128, 2, 2), (128, 50, 50)]


def test_a_workspace_that_grows_no_further_raises_all_peaks() -> None:
    def estimate(shape: Shape) -> int:
        return 1000 + min(5000, shape.rows * shape.target * 100) + shape.rows * shape.target * 10

    peaks = PeakModel(estimate, Shape(100, 10, 10))
    shape = Shape(10, 10, 10)
    assert peaks(shape) < estimate(shape)
    assert not peaks.check(shape)
    assert peaks(shape) == estimate(shape)
    assert peaks.check(shape)
    assert peaks(Shape(20, 10, 10)) >= estimate(Shape(20, 10, 10))


def peaks_of(phases: list[Phase], gradients: int = 0) -> Callable[[Implementations, Shape, bool], int]:
    """Peaks of settings each of which keeps half as much as the one before it."""
    kept = {
        setting: [Phase(p.fixed, tuple(int(0.5**number * value) for value in p.coefficients)) for p in phases]  # type: ignore[arg-type]
        for number, setting in enumerate(LADDER)
    }
    return lambda setting, shape, accumulating: peak_of(kept[setting], shape) + gradients * accumulating


def planner_of(shapes: list[BatchShape], budget: int, peak: Any, **settings: Any) -> Planner:
    options = {"accumulating": False, "width": 10, **settings}
    return Planner(shapes, LADDER, budget, peak, **options)


@given(phases=PHASES, shapes=SHAPES, budget=st.integers(500, 3_000_000), gradients=st.integers(0, 2000))
@hypothesis_settings(max_examples=100)
def test_every_micro_batch_fits_and_only_what_cannot_fit_is_refused(
    phases: list[Phase], shapes: list[BatchShape], budget: int, gradients: int
) -> None:
    peak = peaks_of(phases, gradients)

    def plan(size: int, kept: list[BatchShape] = shapes) -> list[BatchBudget]:
        return planner_of(kept, size, peak, width=1, outside=OUTSIDE).allot()

    one = max(peak(LEAN, Shape(1, shape.source, shape.target), True) for shape in shapes)
    limit = usable(budget)
    try:
        found = plan(budget)
    except InputError as error:
        assert one > limit
        advice = re.fullmatch(
            r"training\.memory_budget .*: one sentence of the worst bucket, (\d+) x (\d+), needs .*; set "
            r"training\.memory_budget=([^ ]+)(?: or data\.max_length=(\d+))?",
            str(error),
        )
        assert (int(advice[1]), int(advice[2])) in {(shape.source, shape.target) for shape in shapes}
        wanted = parse_size(advice[3]) - OUTSIDE
        assert wanted > budget
        assert plan(wanted)
        if advice[4] is not None:
            longest = int(advice[4]) + 1
            short = [shape for shape in shapes if max(shape.source, shape.target) <= longest]
            assert not short or plan(budget, short)
        return
    assert {entry[:4] for entry in found} == set(shapes)
    for entry in found:
        whole = Shape(entry.sentences, entry.source, entry.target)
        part = Shape(entry.rows, entry.source, entry.target)
        assert 1 <= entry.rows <= entry.sentences
        assert -(-entry.sentences // entry.parts) == entry.rows
        exact = peak(entry.implementations, part, entry.parts > 1)
        # One sentence may be told to need more than the limit and still not do so.
        assert exact <= limit
        assert exact <= entry.peak
        if entry.implementations != AUTO:
            assert PeakModel(lambda s: peak(AUTO, s, False), shape_of(shapes))(whole) > limit
        if entry.parts > 1:
            assert entry.implementations == LEAN
    if any(entry.parts > 1 for entry in found):
        planner = planner_of(shapes, budget, peak, width=1, outside=OUTSIDE)
        enough = parse_size(planner.budget_of_whole_batches()) - OUTSIDE
        assert enough > budget
        assert all(entry.parts == 1 for entry in plan(enough))


def shape_of(shapes: list[BatchShape]) -> Shape:
    return Shape(*(max(shape[field] for shape in shapes) for field in (2, 0, 1)))


SAME_ROWS = [BatchShape(n, n, 100, batches) for n, batches in ((10, 50), (20, 30), (40, 9), (80, 2))]
LINEAR = [Phase(100_000, (0, 0, 1000, 0))]


def allot(budget: int, **options: int) -> dict[int, BatchBudget]:
    planner = planner_of(SAME_ROWS, budget, peaks_of(LINEAR, **options))
    return {entry.target: entry for entry in planner.allot()}


def test_where_gradients_persist_all_batches_add_to_them() -> None:
    """Gradients that persist for one divided shape are there in the steps of all others."""
    peak = peaks_of(LINEAR, gradients=800_000)
    found = []
    for persists in (False, True):
        entries = planner_of(SAME_ROWS, 1_900_000, peak, persists=persists).allot()
        assert MemoryPlan(1_900_000, entries, 1).divides == any(entry.parts > 1 for entry in entries)
        found.append({entry.target: entry for entry in entries})
    free, kept = found
    assert free[80].parts > 1
    assert free[10].implementations == AUTO
    assert kept[80] == free[80]
    assert kept[10].implementations != AUTO
    for entry in kept.values():
        part = Shape(entry.rows, entry.source, entry.target)
        assert peak(entry.implementations, part, True) <= entry.peak <= usable(1_900_000)


@pytest.mark.parametrize("persists", [False, True])
def test_a_plan_tells_the_budget_with_which_no_batch_is_divided(persists: bool) -> None:
    """It is told for gradients as they are then, not for those to which parts add."""
    peak = peaks_of(LINEAR, gradients=800_000)

    def planner(budget: int) -> Planner:
        return planner_of(SAME_ROWS, budget, peak, persists=persists)

    told = parse_size(planner(1_900_000).budget_of_whole_batches())
    needed = (100_000 + 100 * 80 * 250) / (1.0 - RESERVE)
    assert needed < told < 1.1 * needed
    assert not MemoryPlan(told, planner(told).allot(), 1).divides
    assert MemoryPlan(1_900_000, planner(1_900_000).allot(), 1).divides


def test_a_peak_that_is_exactly_the_limit_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of(SAME_ROWS, 10_000_000, peaks_of(LINEAR))
    most = planner._peaks(AUTO, False).most
    monkeypatch.setattr(planner, "_limit", most)
    # All shapes have the peak of the largest then: none is looked at alone.
    assert [(entry.peak, entry.implementations) for entry in planner.allot()] == [(most, AUTO)] * 4


def test_small_buckets_stay_as_they_are_and_large_ones_keep_less() -> None:
    # 80 positions: 8.1 MB as it is, 4.1 MB with the second setting.
    found = allot(4_500_000)
    assert [found[target].implementations for target in (10, 20, 40, 80)] == [AUTO, AUTO, AUTO, LADDER[1]]
    assert {entry.parts for entry in found.values()} == {1}
    assert found[80].peak == 100_000 + 100 * 80 * 500


def test_batches_that_do_not_fit_at_all_are_divided_evenly() -> None:
    # Not divided, the last setting takes 2.1 MB for 80 positions; 0.97 MB leave room for 43 rows.
    found = allot(1_000_000)
    assert (found[80].implementations, found[80].parts, found[80].rows) == (LEAN, 3, 34)
    assert found[80].peak == pytest.approx(100_000 + 34 * 80 * 250, rel=0.01)
    assert [found[target].parts for target in (10, 20, 40)] == [1, 1, 2]
    assert found[10].implementations == LADDER[1]
    # Gradients to add to make them smaller.
    assert allot(1_000_000, gradients=400_000)[80].parts == 5


def test_the_largest_micro_batch_is_that_of_the_highest_peak() -> None:
    plan = MemoryPlan(1_000_000, allot(1_000_000).values(), 7)
    assert plan.worst.peak == max(entry.peak for entry in plan)
    equal = [BatchBudget(8, 8, 4, 1, 4, 100, AUTO), BatchBudget(16, 8, 4, 1, 4, 100, AUTO)]
    assert MemoryPlan(100, equal, 1).worst.source == 16
    for small, large in (((8, 8, 9), (8, 10, 8)), ((9, 8, 1), (8, 8, 2)), ((8, 9, 1), (1, 8, 10))):
        shapes = [BatchBudget(*shape[:2], 4, 1, shape[2], 100, AUTO) for shape in (small, large)]
        assert MemoryPlan(100, shapes, 1).worst == shapes[1]
        assert MemoryPlan(100, shapes[::-1], 1).worst == shapes[1]
    validated = BatchBudget(32, 32, 4, 0, 4, 999, AUTO)
    assert MemoryPlan(100, [*equal, validated], 1).worst.source == 16


def test_settings_are_tried_by_bisection() -> None:
    tried = set()
    ladder = [Implementations(stash=str(number)) for number in range(9)]

    def peak(setting: Implementations, shape: Shape, accumulating: bool) -> int:
        tried.add(int(setting.stash))
        return 10_000 - 1000 * int(setting.stash) + shape.rows

    shapes = [BatchShape(8, 8, 10, 3)]
    found = Planner(shapes, ladder, 4200, peak, accumulating=False, width=8).allot()
    assert found[0].implementations == ladder[6]
    assert len(tried) <= 6


def batch(rows: int, source: int, target: int) -> Batch:
    lengths, ids = np.full(rows, 1), np.full((rows, 1), 5)
    return pad_batch(np.arange(rows), ids, lengths, ids, lengths, (source, target))


def test_other_shapes_get_what_the_known_ones_make_of_them() -> None:
    shapes = [BatchBudget(8, 8, 64, 3, 64, 900, AUTO), BatchBudget(16, 16, 64, 3, 10, 800, LEAN)]
    plan = MemoryPlan(1000, shapes, 5)
    exact = plan.find(batch(64, 16, 16))
    assert (exact.rows, exact.implementations) == (10, LEAN)
    # Smaller than the first; between both: half as many rows as in the first at twice the positions.
    assert plan.find(batch(64, 8, 4))[:6] == (8, 4, 64, 0, 64, 900)
    assert plan.find(batch(64, 16, 8)).rows == 32
    assert plan.find(batch(20, 16, 8)).rows == 20
    assert plan.find(batch(64, 16, 8)).implementations == AUTO
    # Longer than all, as validation may be.
    assert plan.find(batch(64, 32, 16)).rows == 8
    assert plan.find(batch(64, 1000, 1000)).rows == 1


def test_halving_is_remembered_for_one_shape() -> None:
    shapes = [BatchBudget(8, 8, 64, 3, 33, 900, AUTO), BatchBudget(16, 16, 9, 3, 9, 800, LEAN)]
    plan = MemoryPlan(1000, shapes, 5, "2GiB")
    assert plan.halve(plan.find(batch(64, 8, 8)), 33).rows == 17
    assert plan.find(batch(64, 8, 8)).rows == 17
    assert plan.halve(plan.find(batch(64, 8, 8)), 5).rows == 3
    assert plan.find(batch(9, 16, 16)).rows == 9
    other = plan.find(batch(6, 32, 16))
    plan.halve(other, 4)
    assert plan.find(batch(6, 32, 16)).rows == 2
    assert plan.worst.batches == 3
    back = MemoryPlan.from_state_dict(json.loads(json.dumps(plan.state_dict())))
    assert (back.budget, back.decoding_rows, list(back), back.whole) == (1000, 5, list(plan), "2GiB")
    assert next(iter(back)).implementations == AUTO


def test_the_table_has_a_row_for_each_treatment() -> None:
    cells = cells_of(MemoryPlan(4_500_000, allot(4_500_000).values(), 7))
    assert cells == [
        ("3", "40 x 40", "89", "100", "1", "auto", "3.91 MiB"),
        ("1", "80 x 80", "2", "100", "1", "recompute decoder", "3.91 MiB"),
    ]
    divided = cells_of(MemoryPlan(1_000_000, allot(1_000_000).values(), 7))
    assert ("1", "80 x 80", "2", "100", "3 of 34") in [row[:5] for row in divided]
    words = [BatchBudget(8, 8, 64, 3, 32, 9, LEAN), BatchBudget(16, 16, 32, 5, 16, 8, LEAN)]
    rows = [("2", "16 x 16", "8", "32 to 64", "2 of 16 to 32", describe(LEAN), "9 B")]
    assert cells_of(MemoryPlan(10, words, 1)) == rows
    title = "plan for a memory budget of 10 B (training.memory_budget=20KiB divides no batch)"
    assert plan_table(MemoryPlan(10, words, 1, "20KiB")).title == title
    halved = MemoryPlan(10, [*words, BatchBudget(4, 4, 3, 0, 2, 99, LEAN)], 1)
    assert cells_of(halved) == rows


def test_describe() -> None:
    assert describe(AUTO) == "auto"
    some = Implementations("compiled", "recompute", "auto", "recompute", "cells")
    assert describe(some) == "compiled encoder; recompute decoder, output; stash cells"


def cells_of(plan: MemoryPlan) -> list[tuple[object, ...]]:
    return list(zip(*(map(str, column.cells) for column in plan_table(plan).columns), strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_begin_with_the_given_one_and_end_with_the_leanest(device: str) -> None:
    found = settings(AUTO, device)
    assert found[0] == AUTO
    assert found[-1] == LEAN
    assert len(set(found)) == len(found) == 8
    # The cheapest first; gates are kept until it is the LSTM's turn.
    assert found[1] == Implementations(output="recompute")
    assert found[2] == Implementations("auto", "recompute", "recompute", "recompute", "gates")
    assert PRICES[device]["stash"] == max(PRICES[device].values())
    assert [setting.stash for setting in found[3:]] == ["gates", "cells", "attention", "outputs", "least"]


def test_what_a_recipe_names_stays() -> None:
    named = Implementations("recompute", "reference", "recompute", "compiled", "cells")
    assert settings(named, "cpu") == [named]
    plain, recomputing = ("reference", "reference"), ("recompute", "compiled", "recompute", "compiled")
    for some, leanest in (
        (Implementations(*plain), Implementations(*plain, "recompute", "recompute")),
        (Implementations("reference"), LEAN._replace(encoder="reference")),
        (Implementations(stash="cells"), Implementations.everywhere("recompute", "cells")),
        (Implementations(*recomputing), Implementations(*recomputing, "least")),
    ):
        assert settings(some, "cpu")[-1] == leanest


VOCABULARY = 60


def small(*overrides: str) -> Recipe:
    sizes = ("embedding=8", "encoder.size=16", "decoder.size=16", "attention.size=16")
    return load_recipe("quickstart", [*(f"model.{size}" for size in sizes), *overrides])


SHAPES_ONLY = (
    "data. ops. decoding. training.batch. training.bptt training.valid_rows training.max_buckets training.bucket_width "
    "training.trim_batches training.memory_budget training.update_interval training.precision "
    "training.decode_and_evaluate training.seed"
)
"""Keys that a plan depends on, and the bytes of a step of a given shape, precision and implementations do not."""


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
def test_estimates_are_told_apart_by_every_key_that_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, estimates = small(), count()
    monkeypatch.setattr(planner_module, "_PEAKS", {})
    monkeypatch.setattr(planner_module, "estimate_step", lambda *_, **__: next(estimates))
    monkeypatch.setattr(planner_module, "demand", int)

    def peak(recipe: Recipe) -> int:
        task = SimpleNamespace(recipe=recipe, name="translation", sizes=(1, 1))
        return estimator(task, "cpu", NAMED["float32"])(AUTO, Shape(3, 2, 2), False)  # type: ignore[arg-type]

    before = peak(recipe)
    alike = set()
    for key, _ in leaves(recipe):
        changed = recipe.model_copy(deep=True)
        *sections, name = key.split(".")
        section = reduce(getattr, sections, changed)
        section.__dict__[name] = "another value"
        if peak(changed) == before:
            alike.add(key)
    expected = {key for key, _ in leaves(recipe) if key.startswith(tuple(SHAPES_ONLY.split()))}
    expected.add("task")  # the task has its own name
    assert alike ^ expected <= marked_keys(Recipe, KeyMark.NO_MEMORY)


def searched(recipe: Recipe, sentences: int, length: int) -> int:
    """The peak of a real search."""
    torch.manual_seed(3)
    model = build_model(recipe, VOCABULARY, VOCABULARY).eval()
    with torch.no_grad():
        model.output.bias[3] = -100.0  # no translation ends before it must
    source = torch.randint(4, VOCABULARY, (sentences, length))
    lengths = torch.full((sentences,), length)
    limits = output_limits(lengths, recipe.decoding.max_output_factor)
    tracker = Tracker(CPU)
    for parameter in model.parameters():
        tracker.label(parameter, "weights", "other")
    with tracker.recording():
        tracker.begin("forward")
        options = SearchOptions.from_recipe(recipe.decoding)
        beam_search(IncrementalModel(model), source, lengths, limits, options)
    return tracker.peak()[0]


@pytest.mark.parametrize(("sentences", "length"), [(1, 6), (12, 9)])
def test_a_search_takes_what_was_predicted_or_a_little_less(sentences: int, length: int) -> None:
    recipe = small("decoding.beam_size=4", "decoding.max_output_factor=1.0")
    target = length - 1 + 10 + 1
    predicted = estimate_search(recipe, VOCABULARY, VOCABULARY, (sentences, length, target), "cpu")
    found = searched(recipe, sentences, length)
    assert 0.98 * found <= predicted <= 1.25 * found


def test_search_rows() -> None:
    for limit, rows in {2000: 64, 1645: 64, 1639: 63, 1015: 1, 1009: 0}.items():
        assert search_rows(lambda sentences: 1000 + 10 * sentences, limit, 64) == rows
    assert search_rows(lambda sentences: 1000 + 10 * sentences, 1009, 1) == 0


NEAR_TENTHS = st.builds(lambda a, b: a * 2**30 // 10 + b, st.integers(1, 10**5), st.integers(0, 2))


@given(st.one_of(st.integers(1, 2**45), NEAR_TENTHS))
def test_the_nearest_budget_is_enough_and_near(size: int) -> None:
    found = parse_size(nearest_budget(size))
    assert size <= found
    assert found <= 1.11 * size + 1


def test_sizes_as_words() -> None:
    words = [size_text(size) for size in (17, 1 << 10, 1000 << 10, int(1.3 * (1 << 30)))]
    assert words == ["17 B", "1 KiB", "0.977 MiB", "1.3 GiB"]
    assert nearest_budget(int(1.33 * (1 << 30))) == "1.4GiB"
    assert nearest_budget(133 << 20) == "140MiB"


def test_auto_takes_most_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "free_memory", lambda device: 1000)
    monkeypatch.setattr(budgets, "group_memory", lambda: None)
    assert budget_bytes("auto", CPU, 500) == int(AUTO_SHARE * 1500)
    monkeypatch.setattr(budgets, "group_memory", lambda: 300)
    assert budget_bytes("auto", CPU, 500) == int(AUTO_SHARE * 800)
    assert budget_bytes("4GiB", CPU, 500) == 4 << 30


def write_group(folder: Path, limit: str, used: int, droppable: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {droppable}\n")


def test_the_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    monkeypatch.setattr(budgets, "_GROUPS", groups)
    monkeypatch.setattr(budgets, "_OWN_GROUP", own)
    assert group_memory() is None
    own.write_text("0::/jobs/mine\n")
    assert group_memory() is None
    second = ("memory.max", "memory.current", "inactive_file")
    write_group(groups / "jobs" / "mine", "max", 10, 0, second)
    assert group_memory() is None
    write_group(groups / "jobs", "1000", 700, 50, second)
    assert group_memory() == 350
    write_group(groups / "jobs" / "mine", "500", 400, 0, second)
    assert group_memory() == 100
    write_group(groups / "jobs" / "mine", "500", 600, 0, second)
    assert group_memory() == 0
    own.write_text("4:memory:/docker/x\n")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    write_group(groups / "memory", "2000", 500, 100, first)
    assert group_memory() == 1600


def test_a_hopeless_budget_is_refused_by_estimates_of_one_sentence() -> None:
    seen = []

    def peak(_: Implementations, shape: Shape, accumulating: bool) -> int:
        seen.append(shape)
        return 5000 + shape.rows * shape.source * shape.target

    settings = [Implementations.definitions(), Implementations.leanest("cpu")]
    shapes = [BatchShape(50, 60, 64, 9), BatchShape(20, 20, 64, 9)]
    planner = Planner(shapes, settings, 1000, peak, accumulating=False, width=10)
    with pytest.raises(InputError, match="one sentence of the worst bucket, 50 x 60, needs"):
        planner.allot()
    assert {shape.rows for shape in seen} == {1}
    assert len(seen) <= 3


def test_a_refusal_names_the_longest_sentences_that_fit() -> None:
    def plan(longest: int) -> list[BatchBudget]:
        sides = range(10, longest + 1 + 10, 10)  # of sentences with their end
        return planner_of([BatchShape(side, side, 8, 3) for side in sides], 3500, peak).allot()

    def peak(_: Implementations, shape: Shape, accumulating: bool) -> int:
        return 1000 + shape.rows * shape.source * shape.target

    with pytest.raises(InputError, match=r" or data\.max_length=(\d+)$") as refused:
        plan(79)
    longest = int(str(refused.value).rpartition("=")[2])
    assert plan(longest)
    with pytest.raises(InputError):
        plan(longest + 1)
