"""Measures what a training step of a recipe keeps and how long it takes, in one or several techniques.

Shapes are (B, S, T): sentence pairs, source positions, target positions. Rows are full and token ids are random, since
memory and time do not depend on the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from econmt.engine.devices import peak_memory, seconds_of
from econmt.engine.graphs import GraphedStep
from econmt.engine.outside_memory import outside_meter
from econmt.engine.step import StepResult
from econmt.errors import printable
from econmt.memory.estimate.techniques import Say, Technique, estimate, estimates, fixed_bytes
from econmt.memory.measure.byte_budget import budget_bytes
from econmt.memory.measure.kernels import KernelTimes, measure_kernels, optimizer_bytes
from econmt.memory.measure.ledger import Ledger, measure_step
from econmt.memory.measure.process import resident_parts
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank, simulated_step
from econmt.tasks.protocol import Shape, Task
from econmt_ops.dispatch.rule import captured

ROUNDS = 3
"""Number of timed steps of each technique, which take turns; the fastest counts."""

TIME_LIMIT = 60.0
"""Seconds that measuring on a CPU may take, unless the user asks for whole steps."""

_PASSES = ROUNDS + 4
"""Cost of measuring a technique, in steps: a warm-up, a tracked one (which takes twice as long), one timed by layer."""


@dataclass
class Profile:
    """Profile of one technique at one shape.

    Attributes:
        shape: Shape of the batch that ``bytes`` is about.
        bytes: Ledger of the step's bytes.
        measured: True if the bytes were measured, False if they are estimated.
        times: Ledger of a timed step; None if no step was timed.
        timed_shape: Shape of the timed step.
    """

    technique: Technique
    shape: Shape
    bytes: Ledger
    measured: bool
    times: Ledger | None = None
    timed_shape: Shape | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens per second without padding; None if no step was timed."""
        return None if self.times is None else self.times.tokens_per_second


_Result = TypeVar("_Result")


class Failures:
    """Errors of techniques that could not be measured, collected so that the others still are."""

    def __init__(self) -> None:
        self.errors: dict[Technique, Exception] = {}

    def attempt(self, technique: Technique, work: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Returns the result of ``work``; None if it fails or the technique has failed before.

        It catches errors of PyTorch and its compiler, and lack of memory.
        """
        if technique in self.errors:
            return None
        try:
            return work(*arguments)
        except (RuntimeError, AssertionError, MemoryError) as error:
            self.errors[technique] = error
            return None

    def raise_first(self) -> None:
        """Raises the first error, if there is one."""
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
    """Training step on a batch of random ids, which can run repeatedly with any technique; simulates other ranks.

    Attributes:
        device: Device on which it runs.
    """

    def __init__(self, task: Task, shape: Shape, device: torch.device, rank: Rank = ALONE) -> None:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(task.recipe.training.seed)
            self.training = simulated_step(task, task.build_model().train().to(device), rank, shape)
            self._example = task.example(shape)
        self._batch = self._example.to(device)
        self._tokens = self.training.tokens([self._batch])
        self.device, self._rank = device, rank
        self.training.prepare()

    def use(self, technique: Technique) -> None:
        """Sets the technique of the next steps."""
        self.training.implementations = technique.implementations
        self.training.precision = technique.precision

    def run(self) -> StepResult:
        """Runs one step."""
        return self.training.run([self._batch], self._tokens)

    def seconds(self) -> float:
        """Runs one step and returns its seconds."""
        return seconds_of(self.run, self.device)

    def measure(self) -> Ledger:
        """Returns the ledger of a step with its times, after a warm-up step."""
        self.run()
        accumulating = self.training.task.recipe.training.update_interval > 1
        ledger = measure_step(self.training, self._batch, accumulating=accumulating)
        ledger.rank = self._rank.text
        return ledger

    def replay(self, times: int) -> tuple[float, int] | None:
        """Captures the step in a CUDA graph and replays it.

        Returns:
            Seconds of the fastest replay, and the graph's bytes outside of PyTorch's allocator; None if the step cannot
            be captured.
        """
        meter = outside_meter(self.device)
        graphed, before = GraphedStep(self.training), meter.read().total
        graphed.capture(self._example)
        if not graphed.captured:
            return None
        outside = meter.read().total - before
        seconds = min(seconds_of(lambda: graphed([self._example]), self.device) for _ in range(times))
        graphed.release()
        return seconds, outside

    def trace(self, path: Path) -> None:
        """Writes a Chrome trace of one step by PyTorch's profiler, after a warm-up step."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.run()
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            self.seconds()
        profiler.export_chrome_trace(str(path))

    def forget(self) -> None:
        """Frees the memory that a failed step has left allocated."""
        self.training.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def profile(
    task: Task,
    techniques: Sequence[Technique],
    shape: Shape,
    device: torch.device,
    *,
    patient: bool,
    say: Say,
    rank: Rank,
    failures: Failures,
) -> list[Profile]:
    """Measures techniques, of which the first needs most memory, as well as the machine allows.

    On a CPU, bytes and times come from real steps if these fit the free memory and take about :data:`TIME_LIMIT`
    seconds at most, or however long if ``patient``; otherwise bytes are estimated and times are those of fewer rows. On
    a GPU, a technique that lacks memory has estimated bytes and no times. If the recipe trains in CUDA graphs, seconds
    are those of a replay, whereas bytes and layers are those of the same step launched kernel by kernel.

    Returns:
        Profiles of the techniques that did not fail.
    """
    profiler = _Profiler(task, techniques, shape, device, say, rank, failures)
    profiles = profiler.on_gpu() if device.type == "cuda" else profiler.on_cpu(patient)
    if not profiles:
        failures.raise_first()
    return profiles


@dataclass
class _Profiler:
    """Arguments of :func:`profile`, with a method for each type of device."""

    task: Task
    techniques: Sequence[Technique]
    shape: Shape
    device: torch.device
    say: Say
    rank: Rank
    failures: Failures

    def on_cpu(self, patient: bool) -> list[Profile]:
        first_technique, shape = self.techniques[0], self.shape
        self.say(f"predicting {first_technique.name}, {shape}")
        first = estimate(self.task, first_technique, shape, "cpu", self.rank)
        rows = min(shape.rows, rows_that_fit(first, shape, budget_bytes("auto", self.device, 0)))
        if rows and not patient:
            rows = affordable_rows(self._round_time, rows, TIME_LIMIT / _PASSES)
        timed_shape = shape._replace(rows=rows)
        times: dict[Technique, Ledger] = {}
        if rows:
            step = Step(self.task, timed_shape, self.device, self.rank)
            times = self._measure(step, step.measure)
            times = self._take_turns(step, times)
            if times:
                last = next(reversed(times.values()))
                last.process, last.process_peak = resident_parts(), peak_memory(self.device)
        if timed_shape == shape:
            return [Profile(row, shape, ledger, True, ledger, shape) for row, ledger in times.items()]
        guesses = [first, *estimates(self.task, self.techniques[1:], shape, "cpu", self.say, self.rank)]
        return [
            Profile(row, shape, guess, False, times.get(row), timed_shape if row in times else None)
            for row, guess in zip(self.techniques, guesses, strict=True)
            if row not in self.failures.errors
        ]

    def _round_time(self, rows: int) -> float:
        """Returns the seconds of a step with so many rows, summed over the techniques."""
        self.say(f"timing {rows} of {self.shape.rows} rows, to see what can be measured")
        step = Step(self.task, self.shape._replace(rows=rows), self.device, self.rank)

        def seconds() -> float:
            step.run()
            return step.seconds()

        total = 0.0
        for technique in self.techniques:
            step.use(technique)
            total += self.failures.attempt(technique, seconds) or 0.0
        return total

    def on_gpu(self) -> list[Profile]:
        in_graphs = self.task.recipe.training.in_graphs
        ledgers: dict[Technique, Ledger] = {}
        try:
            step = Step(self.task, self.shape, self.device, self.rank)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
        else:
            ledgers = self._measure(step, lambda: _measure_gpu(step, in_graphs))
            ledgers |= self._take_turns(step, {row: it for row, it in ledgers.items() if it.graphs is None})
        missing = [row for row in self.techniques if row not in ledgers and row not in self.failures.errors]
        guesses = estimates(self.task, missing, self.shape, "cuda", self.say, self.rank)
        guess_of = dict(zip(missing, guesses, strict=True))
        return [
            Profile(row, self.shape, guess_of[row], False)
            if row in guess_of
            else Profile(row, self.shape, ledgers[row], True, ledgers[row], self.shape)
            for row in self.techniques
            if row not in self.failures.errors
        ]

    def _measure(self, step: Step, measure: Callable[[], Ledger | None]) -> dict[Technique, Ledger]:
        """Returns the ledgers of the techniques that can be measured."""
        ledgers: dict[Technique, Ledger] = {}
        for number, technique in enumerate(self.techniques, 1):
            self.say(f"measuring {number} of {len(self.techniques)}: {technique.name}")
            step.use(technique)
            ledger = self.failures.attempt(technique, measure)
            if ledger is None:
                step.forget()
            else:
                ledgers[technique] = ledger
        return ledgers

    def _take_turns(self, step: Step, ledgers: dict[Technique, Ledger]) -> dict[Technique, Ledger]:
        """Times the techniques in turns; returns the ledgers of those that did not fail, with their shortest times."""
        for turn in range(2, ROUNDS + 1):
            for number, (technique, ledger) in enumerate(ledgers.items(), 1):
                self.say(f"timing {number} of {len(ledgers)}: {technique.name}, turn {turn} of {ROUNDS}")
                step.use(technique)
                seconds = self.failures.attempt(technique, step.seconds)
                if seconds is not None:
                    ledger.take(min(ledger.seconds, seconds))
        return {row: ledger for row, ledger in ledgers.items() if row not in self.failures.errors}


def _measure_gpu(step: Step, in_graphs: bool) -> Ledger | None:
    """Returns the ledger of a step on a GPU, timed as a CUDA graph if possible; None if there is too little memory."""
    ledger = None
    with suppress(torch.cuda.OutOfMemoryError), captured(in_graphs):
        ledger = step.measure()
    step.forget()
    if in_graphs and ledger is not None:
        with suppress(torch.cuda.OutOfMemoryError):
            replayed = step.replay(ROUNDS)
            if replayed is not None:
                seconds, ledger.graphs = replayed
                ledger.take(seconds)
        step.forget()
    if ledger is not None:
        ledger.outside = outside_meter(step.device).read()
    return ledger


def rows_that_fit(ledger: Ledger, shape: Shape, memory: int) -> int:
    """Returns the rows that fit into ``memory`` bytes, by a ledger of ``shape``, whose fixed bytes do not grow."""
    if ledger.peak <= memory:
        return shape.rows
    fixed = fixed_bytes(ledger)
    return max(0, (memory - fixed) * shape.rows // max(1, ledger.peak - fixed))


def affordable_rows(round_time: Callable[[int], float], rows: int, limit: float) -> int:
    """Returns the largest batch predicted to stay within ``limit`` seconds: all ``rows``, or a power of two.

    ``round_time`` returns the seconds of a step by rows; it is called with about a sixteenth and an eighth of ``rows``.
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
    """Measures the kernels of a step on a GPU: the reference's launched one by one, the recipe's in a CUDA graph.

    Returns:
        Both; without the reference if memory is too small for it.
    """
    results = []
    with suppress(torch.cuda.OutOfMemoryError):
        say("kernels of the reference, launched one by one")
        step = Step(task, shape, device, rank)
        step.use(own._replace(implementations=Implementations.definitions()))
        step.run()
        results.append(measure_kernels("reference, one by one", step.run, device, _known_bytes(step)))
        step.forget()
    step = Step(task, shape, device, rank)
    step.use(own)
    say("kernels of a CUDA graph")
    graphed = GraphedStep(step.training, note=say)
    batch = task.example(shape)
    graphed([batch])
    name = "in a CUDA graph" if graphed.captured else "one by one"
    results.append(measure_kernels(name, lambda: graphed([batch]), device, _known_bytes(step)))
    return results


def _known_bytes(step: Step) -> dict[str, int]:
    """Returns the bytes that classes of kernels read and write in a step, for the classes where they are known."""
    parameters = [part for part in step.training.model.parameters() if part.requires_grad]
    moments = sum(step.training.optimizer.moment_bytes(part) for part in parameters)
    return {"optimizer": optimizer_bytes(sum(part.numel() for part in parameters), moments // 4)}
