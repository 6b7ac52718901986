"""Techniques are measured where that is possible, and estimated where it is not."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt.config.recipe import load_recipe
from econmt.engine.machine import describe_machine, free_memory, total_memory
from econmt.engine.outside_memory import ASSUMED, outside_meter
from econmt.engine.precision import NAMED
from econmt.estimate import profiling
from econmt.estimate.profiling import (
    Failures,
    Profile,
    Step,
    TechniqueProfiler,
    affordable_rows,
    rows_that_fit,
)
from econmt.estimate.techniques import Technique, estimate, techniques
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_memory.measure import ram
from econmt_memory.measure.ledger import Ledger
from econmt_ops.dispatch.device_limits import H200
from econmt_ops.dispatch.measurements import processor
from econmt_ops.dispatch.rule import rules_only
from econmt_ops.dispatch.traits import implementations_of

SIZES = ("embedding=8", "encoder.size=16", "decoder.size=16", "attention.size=64")
SMALL = (*(f"model.{size}" for size in SIZES), "training.gradient_clipping.threshold=0.5")
SHAPE = Shape(32, 6, 5)
CPU = torch.device("cpu")
ROWS = [techniques("auto", "cpu", False)[index] for index in (0, 4, 6)]


@pytest.fixture
def task() -> TranslationTask:
    return TranslationTask(load_recipe("iwslt", SMALL), 90, 70)


def profile(
    task: TranslationTask,
    techniques: Sequence[Technique],
    *,
    device: torch.device = CPU,
    shape: Shape = SHAPE,
    patient: bool = True,
    **others: Any,
) -> Iterator[Profile]:
    settings = {"say": str, "rank": ALONE, "failures": Failures(), **others}
    return TechniqueProfiler(task, techniques, shape, device, **settings).profiles(patient=patient)


def use_fake_step(
    monkeypatch: pytest.MonkeyPatch, fails: Technique, error: Exception, graph: tuple[float, int] | None
) -> None:
    """Steps on a GPU that take 2 seconds, or what a graph takes; ``fails`` raises the error when it is measured."""

    class FakeStep:
        def __init__(self, *_: object) -> None:
            self.device = torch.device("cuda")

        def use(self, technique: Technique) -> None:
            self.technique = technique

        def measure(self) -> Ledger:
            if self.technique == fails:
                raise error
            return Ledger(peak=7, tokens=10, seconds=3.0)

        def forget(self) -> None:
            pass

        def replay(self, times: int) -> tuple[float, int] | None:
            assert times == profiling.ROUNDS
            return graph

        def seconds(self) -> float:
            assert graph is None
            assert self.technique != fails
            return 2.0

    monkeypatch.setattr(profiling, "outside_meter", lambda device: SimpleNamespace(read=lambda: ASSUMED))
    monkeypatch.setattr(profiling, "Step", FakeStep)


def test_rows_of_a_comparison() -> None:
    rows = {row.name: row for row in techniques("cells", "cpu", True)}
    usual = ["reference", "+ decoder", "+ encoder", "+ output", "all", "reference, bfloat16", "all, bfloat16"]
    assert list(rows) == [*usual, "all, compiled", "all, compiled, bfloat16"]
    assert usual == [row.name for row in techniques("cells", "cpu", False)]
    decoder = Implementations("reference", "recompute", "recompute", "reference", "gates")
    assert rows["+ decoder"].implementations == decoder
    assert rows["all, compiled, bfloat16"].implementations == Implementations.everywhere("compiled", "cells")
    for name, row in rows.items():
        narrow = ", bfloat16" if name.endswith("bfloat16") else ""
        assert row.compared_with(rows.values()).name == f"reference{narrow}"
        assert (row.precision.dtype == torch.bfloat16) == bool(narrow)


def test_measured_whole_where_memory_and_time_allow(task: TranslationTask) -> None:
    said: list[str] = []
    found = [*profile(task, ROWS, say=said.append)]
    assert [each.technique for each in found] == ROWS
    for each in found:
        assert each.measured
        assert each.times is each.bytes
        assert each.timed_shape == each.shape == SHAPE
        assert each.bytes.tokens == 32 * 5
        assert each.bytes.entries.total() == each.bytes.peak
        predicted = estimate(task, each.technique, SHAPE, "cpu")
        # Words repeat more often than the prediction takes for granted.
        assert 0.93 * predicted.peak <= each.bytes.peak <= 1.02 * predicted.peak
        assert each.tokens_per_second == pytest.approx(160 / each.bytes.seconds)
    reference, everything, narrow = (each.bytes for each in found)
    assert everything.stashed < 0.5 * reference.stashed
    # The decoder's loop is what keeps keys and values; the attention has nothing of its own to keep.
    assert narrow.stash["decoder"] < everything.stash["decoder"]
    assert said[0] == "predicting reference, 32 x 6 x 5"


def test_a_row_comes_as_soon_as_it_is_measured(
    task: TranslationTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is not lost if the user stops; without time left, later rows are predicted only."""
    told: list[str] = []
    monkeypatch.setattr(profiling, "TIME_LIMIT", 0.0)
    monkeypatch.setattr(profiling, "affordable_rows", lambda time, rows, limit: rows)
    rows = profile(task, ROWS[:2], patient=False, say=told.append)
    first = next(rows)
    assert (first.technique, first.measured, first.bytes is first.times) == (ROWS[0], True, True)
    assert told == ["predicting reference, 32 x 6 x 5", "measuring 1 of 2: reference"]
    (second,) = rows
    assert (second.technique, second.measured, second.times) == (ROWS[1], False, None)
    assert second.bytes.peak == estimate(task, ROWS[1], SHAPE, "cpu").peak
    assert told[2:] == ["predicting all, 32 x 6 x 5"]
    timed: Any = SimpleNamespace(tokens=10, seconds=2.0)
    assert replace(second, times=timed).tokens_per_second == 5.0, "of the rows that were timed"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("graph", "speed"), [(None, 5.0), ((0.5, 3000), 20.0)], ids=["launched", "captured"])
def test_on_a_gpu_what_does_not_fit_is_estimated(
    task: TranslationTask, monkeypatch: pytest.MonkeyPatch, graph: tuple[float, int] | None, speed: float
) -> None:
    pytest.importorskip("triton")
    use_fake_step(monkeypatch, fails=ROWS[0], error=torch.cuda.OutOfMemoryError(), graph=graph)
    reference, everything = profile(task, ROWS[:2], device=torch.device("cuda"), patient=False)
    assert (reference.measured, reference.times, reference.bytes.device) == (False, None, "cuda")
    assert reference.bytes.reserved is not None
    assert everything.measured
    assert everything.bytes is everything.times
    assert everything.tokens_per_second == speed
    assert everything.bytes.graphs == (None if graph is None else 3000)
    assert everything.bytes.outside == ASSUMED


@pytest.mark.cuda
@pytest.mark.alone
def test_measured_on_a_gpu() -> None:
    # Steps are measured launched kernel by kernel, where two threads keep a workspace of cuBLAS each.
    recipe = load_recipe("iwslt", ["training.precision=float32", "training.cuda_graphs=off"])
    larger = TranslationTask(recipe, 5000, 5000)
    device, shape = torch.device("cuda"), Shape(64, 30, 25)
    # What other tests of this process have left there is not the step's; cuBLAS will take its workspaces again.
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    left = torch.cuda.memory_allocated()
    for each in profile(larger, ROWS, shape=shape, device=device, patient=False):
        assert each.measured
        assert each.tokens_per_second is not None
        predicted = estimate(larger, each.technique, shape, "cuda")
        # The allocator counts whole blocks, also where a request does not fill the one that it got.
        assert predicted.allocated is not None
        assert each.bytes.peak - left == pytest.approx(predicted.allocated, rel=0.03), each.technique.name


def test_rows_that_fit() -> None:
    ledger = Ledger(peak=1000)
    ledger.entries.update(
        {("weights", "output"): 60, ("optimizer state", "output"): 80, ("feature maps", "output"): 860}
    )
    shape = Shape(8, 5, 5)
    assert [rows_that_fit(ledger, shape, memory) for memory in (100, 299, 300, 999, 2000)] == [0, 0, 1, 7, 8]
    # Where the peak comes before there are gradients, it may be below the bytes counted as fixed.
    ledger.entries["weights", "output"] = 600
    assert [rows_that_fit(ledger, shape, memory) for memory in (999, 1000)] == [0, 8]


@pytest.mark.parametrize(
    ("seconds", "rows", "expected"),
    [
        (lambda rows: 1.0 + 0.1 * rows, 128, 64),  # 90 rows in 10 s
        (lambda rows: 1.0 + 0.01 * rows, 128, 128),
        (lambda rows: 1.0 * rows, 128, 8),
        (lambda rows: 50.0, 128, 1),
        (lambda rows: 50.0, 2, 1),
        (lambda rows: 50.0, 1, 1),
        (lambda rows: 0.5 * rows + 8.0, 128, 4),  # the first is too slow already
        (lambda rows: 9.0, 128, 32),  # no slope seen: 5 % of a step for a sixteenth more rows is assumed
    ],
)
def test_affordable_rows(seconds: object, rows: int, expected: int) -> None:
    asked: list[int] = []

    def time(count: int) -> float:
        asked.append(count)
        value: float = seconds(count)  # type: ignore[operator]
        return value

    assert affordable_rows(time, rows, 10.0) == expected
    both = {128: [8, 16], 2: [1, 2], 1: []}[rows]
    assert asked == (both[:1] if rows > 1 and seconds(both[0]) > 10.0 else both)  # type: ignore[operator]


def test_a_step_trains_and_can_be_traced(task: TranslationTask, tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    step = Step(task, Shape(2, 3, 2), CPU)
    assert torch.equal(torch.get_rng_state(), state)
    step.use(Technique("all", Implementations.everywhere("recompute"), NAMED["float32"]))
    before = float(step.run().loss)
    for _ in range(5):
        after = float(step.run().loss)
    assert after < before
    assert step.seconds() > 0.0
    path = tmp_path / "trace.json"
    step.trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert any("econmt" in event.get("name", "") for event in events)


def test_the_machine_is_described() -> None:
    found = describe_machine("cpu")
    assert found["torch"] == torch.__version__
    assert found["threads"] == str(torch.get_num_threads())
    assert found["processor"] == processor() != ""
    assert 1 << 20 < free_memory(CPU) < 1 << 50


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 << 30, H200.memory))
    assert (total_memory(gpu), free_memory(gpu)) == (H200.memory, 5 << 30)


@pytest.mark.cuda
@pytest.mark.alone
def test_a_graph_takes_memory_that_the_allocator_does_not_see() -> None:
    device = torch.device("cuda")
    numbers = torch.ones(8, device=device)
    numbers.add_(1.0)
    meter, graph = outside_meter(device), torch.cuda.CUDAGraph()
    before = meter.read()
    with torch.cuda.graph(graph):
        for _ in range(20_000):
            numbers.add_(1.0)
    assert meter.read().kernels > before.kernels
    del graph


def test_what_the_system_tells_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:    17 kB\n")
    monkeypatch.setattr(ram, "_MEMORY", tmp_path / "meminfo")
    assert free_memory(CPU) == 17 * 1024
    (tmp_path / "meminfo").unlink()
    assert free_memory(CPU) > 17 * 1024
    for total, free in ((1 << 20, 1 << 19), (0, 1 << 62)):  # which is no limit
        monkeypatch.setattr(ram, "total_ram", lambda _total=total: _total)
        assert ram.free_ram() == free


# Not the output layer's: it keeps a gradient as large as its weight, which pays with more tokens than these.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "row",
    [row for row in techniques("auto", "cpu", False)[1:] if row.name != "+ output"],
    ids=lambda row: row.name,
)
def test_each_technique_alone_keeps_less_than_the_reference(row: Technique) -> None:
    # Layouts in memory differ between the techniques: where they meet, a copy may be made and kept.
    larger, shape = TranslationTask(load_recipe("iwslt", []), 90, 70), Shape(8, 24, 24)
    reference = estimate(larger, techniques("auto", "cpu", False)[0], shape, "cpu")
    assert estimate(larger, row, shape, "cpu").stashed < reference.stashed


def test_kernels_are_compared_as_a_run_uses_them() -> None:
    pytest.importorskip("triton")
    with rules_only("cuda"):
        rows = {row.name: row.implementations for row in techniques("auto", "cuda", False)}
        named = {row.name: row.implementations for row in techniques("gates", "cuda", False)}
    level = implementations_of("attentional_lstm")["triton"].traits.model_stash
    # Products in IEEE float32 take too long for gates to be made again.
    assert rows["all"] == Implementations.everywhere("triton", "gates")
    assert rows["all, bfloat16"] == Implementations.everywhere("triton", level)
    assert rows["all, recompute"] == Implementations.everywhere("recompute", "gates")
    assert named["all, bfloat16"].stash == "gates"


@pytest.mark.parametrize("moment", ["run", "measure"])
def test_a_technique_that_fails_leaves_the_others_measured(
    task: TranslationTask, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """When it is measured, and when techniques take turns: what was told before is in the failures as well."""
    real = getattr(Step, moment)

    def fails(step: Step) -> object:
        if step.training.implementations == ROWS[1].implementations:
            raise AssertionError("no value for symbol s23")
        return real(step)

    monkeypatch.setattr(Step, moment, fails)
    failures = Failures()
    found = [*profile(task, ROWS[:2], failures=failures)]
    assert [each.technique for each in found] == ROWS[: 1 if moment == "measure" else 2]
    assert found[0].measured
    assert found[0].bytes.seconds > 0.0
    assert failures.notes == ["Not measured: all (AssertionError: no value for symbol s23)."]
    with pytest.raises(AssertionError, match="no value for symbol s23"):
        failures.raise_first()
    with pytest.raises(AssertionError, match="no value for symbol s23"):
        list(profile(task, ROWS[1:2]))


def test_a_gpu_technique_that_fails_leaves_the_others_measured(
    task: TranslationTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_step(monkeypatch, fails=ROWS[1], error=RuntimeError("no compiler"), graph=None)
    failures = Failures()
    failures.errors[ROWS[1]] = first = RuntimeError("no compiler")
    assert failures.attempt(ROWS[1], lambda: 1) is None, "not tried again"
    found = [*profile(task, ROWS, device=torch.device("cuda"), patient=False, failures=failures)]
    assert failures.errors[ROWS[1]] is first
    assert [each.technique for each in found] == [ROWS[0], ROWS[2]]
    assert [each.bytes.seconds for each in found] == [2.0, 2.0]
    assert list(failures.errors) == [ROWS[1]]
