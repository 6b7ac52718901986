"""A training step of a recipe in one or several techniques: what each keeps, and how long it takes.

Shapes are (B, S, T): sentence pairs, source positions, target positions. Rows are full and token ids are random, since
what a step takes does not depend on the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from econmt.engine.devices import peak_memory
from econmt.engine.graphs import GraphedStep
from econmt.engine.precision import Precision
from econmt.engine.step import StepResult
from econmt.errors import printable
from econmt.memory.estimate.techniques import Say, Technique, estimate, estimates, fixed_bytes
from econmt.memory.measure.byte_budget import budget_bytes
from econmt.memory.measure.device_memory import DeviceMemory
from econmt.memory.measure.kernels import KernelTimes, measure_kernels, optimizer_bytes
from econmt.memory.measure.ledger import Ledger, measure_step
from econmt.memory.measure.process import resident_parts
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank, simulated_step
from econmt.tasks.protocol import Shape, Task
from econmt_ops.dispatch.rule import captured

ROUNDS = 3
"""Number of timed steps of each technique, in turns; the quickest counts."""

TIME_LIMIT = 60.0
"""Seconds that measuring may take unless it is asked for."""

_PASSES = ROUNDS + 4
"""Steps that a technique costs: one to warm up, one with bytes followed (which counts two), one timed by layer."""


@dataclass
class Profile:
    """One technique at one shape.

    Attributes:
        technique: how the step was run.
        shape: of the batch whose bytes are told.
        bytes: the ledger of its bytes.
        measured: on real tensors; False: on fake ones.
        times: the ledger of a real step with times; None if there was none.
        timed_shape: of that step.
    """

    technique: Technique
    shape: Shape
    bytes: Ledger
    measured: bool
    times: Ledger | None = None
    timed_shape: Shape | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens a second, none of them padding; None if no step was timed."""
        return None if self.times is None else self.times.tokens_per_second


_Result = TypeVar("_Result")


class Failures:
    """Errors of techniques that could not be measured, so that the others still are.

    Attributes:
        errors: by technique.
    """

    def __init__(self) -> None:
        self.errors: dict[Technique, Exception] = {}

    def attempt(self, technique: Technique, work: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Returns the result of ``work``; None if it fails or the technique has failed before.

        Caught are the errors of PyTorch, of its compiler, and of memory that does not suffice.
        """
        if technique in self.errors:
            return None
        try:
            return work(*arguments)
        except (RuntimeError, AssertionError, MemoryError) as error:
            self.errors[technique] = error
            return None

    def raise_first(self) -> None:
        """Raises the error of the technique that failed first, if one has failed."""
        for error in self.errors.values():
            raise error

    @property
    def notes(self) -> list[str]:
        """One sentence for each technique that failed."""
        return [
            printable(f"Not measured: {technique.name} ({type(error).__name__}: {error}".rstrip(": ") + ").")
            for technique, error in self.errors.items()
        ]


class Step:
    """A training step on a real batch, which can be run again and again with any technique.

    Args:
        task: what is trained. shape: of the batch. device: where.
        rank: whose step it is, without the others.
    """

    def __init__(self, task: Task, shape: Shape, device: torch.device, rank: Rank = ALONE) -> None:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(task.recipe.training.seed)
            self.training = simulated_step(task, task.build_model().train().to(device), rank, shape)
            self._example = task.example(shape)
        self._batch = self._example.to(device)
        self._tokens = self.training.tokens([self._batch])
        self._device, self._rank = device, rank
        self.training.prepare()

    def use(self, technique: Technique) -> None:
        """From now on run with this technique."""
        self.training.implementations = technique.implementations
        self.training.precision = Precision(technique.precision)

    def run(self) -> StepResult:
        """Run one step."""
        return self.training.run([self._batch], self._tokens)

    def seconds(self) -> float:
        """Run one step and time it."""
        self._wait()
        begin = time.perf_counter()
        self.run()
        self._wait()
        return time.perf_counter() - begin

    def measure(self) -> Ledger:
        """The ledger of a step with its times, after one to warm up."""
        self.run()
        accumulating = self.training.task.recipe.training.update_interval > 1
        ledger = measure_step(self.training, self._batch, accumulating=accumulating)
        ledger.rank = self._rank.text
        return ledger

    def replay(self, times: int) -> tuple[float, int] | None:
        """Seconds of the step as a CUDA graph, the quickest of some, and what the graph takes outside the allocator.

        Args:
            times: how often the graph is replayed.

        Returns:
            None if the step cannot be captured.
        """
        graphed, memory = GraphedStep(self.training), DeviceMemory(self._device)
        graphed.capture(self._example)
        if not graphed.captured:
            return None
        outside, seconds = memory.read().outside, []
        for _ in range(times):
            begin = time.perf_counter()
            graphed([self._example])
            self._wait()
            seconds.append(time.perf_counter() - begin)
        graphed.release()
        return min(seconds), outside

    def trace(self, path: Path) -> None:
        """Write what PyTorch's profiler sees of one step, after one to warm up, as a Chrome trace."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.run()
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            self.run()
            self._wait()
        profiler.export_chrome_trace(str(path))

    def forget(self) -> None:
        """Free what a step that failed has left."""
        self.training.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def profile(
    task: Task,
    rows: Sequence[Technique],
    shape: Shape,
    device: torch.device,
    *,
    patient: bool,
    say: Say,
    rank: Rank = ALONE,
    failures: Failures | None = None,
) -> list[Profile]:
    """Measure techniques as well as the machine allows.

    On the CPU bytes and times come from real steps if these fit the free memory and are done in about
    :data:`TIME_LIMIT` seconds. Otherwise all bytes are estimates and the times are those of fewer rows. On a GPU a
    technique for which its memory is too small has estimated bytes and no times; where the recipe trains in CUDA graphs
    the seconds are those of a replay, and bytes and layers those of the same step launched kernel by kernel.

    Args:
        task: what is trained.
        rows: the techniques, the one that needs the most memory first.
        shape: of the batch.
        device: where.
        patient: measure however long it takes.
        say: is told what is being done.
        rank: whose step it is.
        failures: collects the errors of techniques that cannot be measured; None: the first is raised when the others
            have been measured.

    Returns:
        Profiles of the techniques that did not fail.
    """
    ended = Failures() if failures is None else failures
    measure_all = _profile_gpu if device.type == "cuda" else _profile_cpu
    found = measure_all(task, rows, shape, device, patient, say, rank, ended)
    if failures is None or not found:
        ended.raise_first()
    return found


def _profile_cpu(
    task: Task,
    rows: Sequence[Technique],
    shape: Shape,
    device: torch.device,
    patient: bool,
    say: Say,
    rank: Rank,
    failures: Failures,
) -> list[Profile]:
    say(f"predicting {rows[0].name}, {shape}")
    first = estimate(task, rows[0], shape, "cpu", rank)
    count = min(shape.rows, rows_that_fit(first, shape, budget_bytes("auto", device, 0)))
    if not patient and count:

        def round_time(trial: int) -> float:
            say(f"timing {trial} of {shape.rows} rows, to see what can be measured")
            step = Step(task, shape._replace(rows=trial), device, rank)
            return sum(failures.attempt(technique, _seconds, step, technique) or 0.0 for technique in rows)

        count = affordable_rows(round_time, count, TIME_LIMIT / _PASSES)
    timed = shape._replace(rows=count)
    times = measure(Step(task, timed, device, rank), rows, say, failures) if count else {}
    if timed == shape:
        return [Profile(row, shape, ledger, True, ledger, shape) for row, ledger in times.items()]
    guesses = [first, *estimates(task, rows[1:], shape, "cpu", say, rank)]
    return [
        Profile(row, shape, guess, False, times.get(row), timed if row in times else None)
        for row, guess in zip(rows, guesses, strict=True)
        if row not in failures.errors
    ]


def _seconds(step: Step, technique: Technique) -> float:
    step.use(technique)
    step.run()
    return step.seconds()


def measure(step: Step, rows: Sequence[Technique], say: Say, failures: Failures) -> dict[Technique, Ledger]:
    """The ledgers of real steps, their seconds the quickest of some that took turns; those that fail have none."""
    ledgers: dict[Technique, Ledger] = {}
    for number, technique in enumerate(rows, 1):
        say(f"measuring {number} of {len(rows)}: {technique.name}")
        step.use(technique)
        ledger = failures.attempt(technique, step.measure)
        if ledger is None:
            step.forget()
        else:
            ledgers[technique] = ledger
    _take_turns(step, ledgers, say, failures)
    ledgers = {row: ledger for row, ledger in ledgers.items() if row not in failures.errors}
    if ledgers:
        last = next(reversed(ledgers.values()))
        last.process, last.process_peak = resident_parts(), peak_memory(step.training.device)
    return ledgers


def _take_turns(step: Step, measured: Mapping[Technique, Ledger], say: Say, failures: Failures) -> None:
    """Times the techniques in turns."""
    for turn in range(1, ROUNDS):
        for number, (technique, ledger) in enumerate(measured.items(), 1):
            say(f"timing {number} of {len(measured)}: {technique.name}, turn {turn + 1} of {ROUNDS}")
            step.use(technique)
            seconds = failures.attempt(technique, step.seconds)
            if seconds is not None:
                ledger.take(min(ledger.seconds, seconds))


def _profile_gpu(
    task: Task,
    rows: Sequence[Technique],
    shape: Shape,
    device: torch.device,
    _patient: bool,
    say: Say,
    rank: Rank,
    failures: Failures,
) -> list[Profile]:
    in_graphs = task.recipe.training.in_graphs
    ledgers: dict[Technique, Ledger] = {}
    try:
        step = Step(task, shape, device, rank)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
    else:
        for number, technique in enumerate(rows, 1):
            say(f"measuring {number} of {len(rows)}: {technique.name}")
            step.use(technique)
            ledger = failures.attempt(technique, _measure_gpu, step, in_graphs)
            if ledger is None:
                step.forget()
            else:
                ledgers[technique] = ledger
        _take_turns(
            step, {row: ledger for row, ledger in ledgers.items() if ledger.graphs is None}, say, failures
        )
    left = [row for row in rows if row not in ledgers and row not in failures.errors]
    predicted = dict(zip(left, estimates(task, left, shape, "cuda", say, rank), strict=True))
    return [
        Profile(row, shape, ledgers[row], True, ledgers[row], shape)
        if row in ledgers
        else Profile(row, shape, predicted[row], False)
        for row in rows
        if row not in failures.errors
    ]


def _measure_gpu(step: Step, in_graphs: bool) -> Ledger | None:
    """The ledger of a step on a GPU, its seconds those of a graph if it can be captured; None: memory is too small."""
    ledger = None
    with suppress(torch.cuda.OutOfMemoryError), captured(in_graphs):
        ledger = step.measure()
    step.forget()
    if in_graphs and ledger is not None:
        with suppress(torch.cuda.OutOfMemoryError):
            found = step.replay(ROUNDS)
            if found is not None:
                seconds, ledger.graphs = found
                ledger.take(seconds)
        step.forget()
    return ledger


def rows_that_fit(ledger: Ledger, shape: Shape, memory: int) -> int:
    """Returns the rows of a batch that fit into a memory, if all but the fixed bytes grow with them."""
    if ledger.peak <= memory:
        return shape.rows
    fixed = fixed_bytes(ledger)
    return max(0, (memory - fixed) * shape.rows // max(1, ledger.peak - fixed))


def affordable_rows(round_time: Callable[[int], float], rows: int, limit: float) -> int:
    """The largest batch that is predicted to stay within a time: all ``rows``, or a power of two.

    Args:
        round_time: seconds of a step with so many rows; called with about a sixteenth and an eighth of ``rows``.
        rows: of the whole batch.
        limit: seconds.
    """
    first = max(1, rows // 16)
    if rows <= first:
        return rows
    short, long = round_time(first), round_time(2 * first)
    slope = max(long - short, 0.05 * long) / first
    affordable = 2 * first + int((limit - long) / slope)
    if affordable >= rows:
        return rows
    return 1 << (max(1, affordable).bit_length() - 1)


def kernels(
    task: Task, own: Technique, shape: Shape, device: torch.device, say: Say, rank: Rank = ALONE
) -> list[KernelTimes]:
    """The kernels of a step on a GPU: of the reference launched one by one, and of the recipe's own in a CUDA graph.

    Args:
        task: what is trained.
        own: the recipe's technique.
        shape: of the batch.
        device: of CUDA.
        say: is told what is being done.
        rank: whose step it is.

    Returns:
        Both, the reference left out where memory is too small for it.
    """
    found = []
    with suppress(torch.cuda.OutOfMemoryError):
        say("kernels of the reference, launched one by one")
        step = Step(task, shape, device, rank)
        step.use(own._replace(implementations=Implementations.definitions()))
        step.run()
        found.append(measure_kernels("reference, one by one", step.run, device, _known(step)))
        step.forget()
    step = Step(task, shape, device, rank)
    step.use(own)
    say("kernels of a CUDA graph")
    graphed = GraphedStep(step.training, note=say)
    batch = task.example(shape)
    graphed([batch])
    name = "in a CUDA graph" if graphed.captured else "one by one"
    found.append(measure_kernels(name, lambda: graphed([batch]), device, _known(step)))
    return found


def _known(step: Step) -> dict[str, int]:
    """Bytes that classes of kernels read and write in a step, where that is plain."""
    parameters = [part for part in step.training.model.parameters() if part.requires_grad]
    moments = sum(step.training.optimizer.moment_bytes(part) for part in parameters)
    return {"optimizer": optimizer_bytes(sum(part.numel() for part in parameters), moments // 4)}
