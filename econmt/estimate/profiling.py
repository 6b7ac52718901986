"""Measures what a training step of a recipe keeps and how long it takes, in one or several techniques.

Shapes are (B, S, T): sentence pairs, source positions, target positions. Rows are full and token ids are random, since
memory and time do not depend on the text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from econmt.data.progress_bars import Say
from econmt.engine.devices import seconds_of
from econmt.engine.graphs import GraphedStep
from econmt.engine.measurement import measure_step
from econmt.engine.outside_memory import outside_meter
from econmt.engine.step import StepResult
from econmt.errors import printable
from econmt.estimate.byte_budget import budget_bytes
from econmt.estimate.kernels import KernelTimes, measure_kernels, optimizer_bytes
from econmt.estimate.techniques import Technique, estimator, fixed_bytes
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank, simulated_step
from econmt.tasks.protocol import Shape, Task
from econmt_memory.measure.ledger import Ledger
from econmt_ops.dispatch.rule import captured

ROUNDS = 3
"""Number of timed steps of each technique, which take turns; the fastest counts."""

TIME_LIMIT = 40.0
"""Seconds that measuring on a CPU may take, unless the user asks for whole steps."""

_PASSES = ROUNDS + 4
"""Cost of measuring a technique, in steps: a tracked one, which takes twice as long, two by layer, and the rounds."""


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
        return self.times.tokens / self.times.seconds if self.times and self.times.seconds else None


_Result = TypeVar("_Result")


class Failures:
    """Errors of techniques that could not be measured, collected so that the others still are.

    Attributes:
        interrupted: True if the user interrupted.
    """

    def __init__(self) -> None:
        self.errors: dict[Technique, Exception] = {}
        self.interrupted = False

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
        """Raises the user's interruption or the first error, if there is one."""
        if self.interrupted:
            raise KeyboardInterrupt
        for error in self.errors.values():
            raise error

    @property
    def notes(self) -> list[str]:
        """A sentence for each technique that failed, and one if the user interrupted."""
        failed = [
            printable(f"Not measured: {technique.name} ({type(error).__name__}: {error}".rstrip(": ") + ").")
            for technique, error in self.errors.items()
        ]
        return [*failed, "Interrupted; these are the figures until then."] if self.interrupted else failed


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
        """Returns the ledger of a step with its times; on a GPU after a warm-up step."""
        if self.device.type == "cuda":
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


@dataclass
class TechniqueProfiler:
    """Measures techniques, of which the first needs most memory, as well as the machine allows."""

    task: Task
    techniques: Sequence[Technique]
    shape: Shape
    device: torch.device
    say: Say
    rank: Rank
    failures: Failures

    def profiles(self, *, patient: bool) -> Iterator[Profile]:
        """Yields the profile of each technique that does not fail, as soon as it is measured.

        On a CPU, bytes and times come from real steps if these fit the free memory and take about :data:`TIME_LIMIT`
        seconds at most, or however long if ``patient``; otherwise bytes are estimated and times are those of fewer
        rows, or missing for techniques for which no time is left. On a GPU, a technique that lacks memory has estimated
        bytes and no times. If the recipe trains in CUDA graphs, seconds are those of a replay, whereas bytes and layers
        are those of the same step launched kernel by kernel. Times may become shorter afterwards, when techniques take
        turns; one that fails then is in ``failures`` as well.
        """
        yield from self._on_gpu() if self.device.type == "cuda" else self._on_cpu(patient)
        if len(self.failures.errors) == len(self.techniques):
            self.failures.raise_first()

    def _on_cpu(self, patient: bool) -> Iterator[Profile]:
        end = math.inf if patient else time.monotonic() + TIME_LIMIT
        shape, predict = self.shape, estimator(self.task, self.shape, self.device.type, self.say, self.rank)
        fitting = rows_that_fit(predict(self.techniques[0]), shape, budget_bytes("auto", self.device, 0))
        rows = min(shape.rows, fitting)
        if rows and not patient:
            rows = affordable_rows(self._step_seconds, rows, TIME_LIMIT / (_PASSES * len(self.techniques)))
        timed_shape = shape._replace(rows=rows)
        step = Step(self.task, timed_shape, self.device, self.rank) if rows else None
        times: dict[Technique, Ledger] = {}
        for technique in self.techniques:
            ledger = None
            if step is not None and (not times or time.monotonic() < end):
                ledger = self._measure(step, technique, step.measure)
            if technique in self.failures.errors:
                continue
            if ledger is not None:
                times[technique] = ledger
            measured = ledger is not None and timed_shape == shape
            whole = ledger if ledger is not None and measured else predict(technique)
            yield Profile(technique, shape, whole, measured, ledger, None if ledger is None else timed_shape)
        if step is not None:
            self._take_turns(step, times, end)

    def _step_seconds(self, rows: int) -> float:
        """Returns the seconds of a step of the first technique with so many rows; 0 if it fails."""
        technique = self.techniques[0]
        self.say(f"timing {rows} of {self.shape.rows} rows, {technique.name}, to see what can be measured")
        step = Step(self.task, self.shape._replace(rows=rows), self.device, self.rank)
        step.use(technique)

        def seconds() -> float:
            step.run()
            return step.seconds()

        return self.failures.attempt(technique, seconds) or 0.0

    def _on_gpu(self) -> Iterator[Profile]:
        in_graphs = self.task.recipe.training.in_graphs
        predict, step = estimator(self.task, self.shape, self.device.type, self.say, self.rank), None
        try:
            step = Step(self.task, self.shape, self.device, self.rank)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
        launched: dict[Technique, Ledger] = {}
        for technique in self.techniques:
            ledger = None
            if step is not None:
                ledger = self._measure(step, technique, partial(_measure_gpu, step, in_graphs))
            if technique in self.failures.errors:
                continue
            if ledger is None:
                yield Profile(technique, self.shape, predict(technique), False)
                continue
            if ledger.graphs is None:
                launched[technique] = ledger
            yield Profile(technique, self.shape, ledger, True, ledger, self.shape)
        if step is not None:
            self._take_turns(step, launched, math.inf)

    def _measure(
        self, step: Step, technique: Technique, measure: Callable[[], Ledger | None]
    ) -> Ledger | None:
        """Returns the ledger of a technique; None if it cannot be measured."""
        number = self.techniques.index(technique) + 1
        self.say(f"measuring {number} of {len(self.techniques)}: {technique.name}")
        step.use(technique)
        ledger = self.failures.attempt(technique, measure)
        if ledger is None:
            step.forget()
        return ledger

    def _take_turns(self, step: Step, ledgers: Mapping[Technique, Ledger], end: float) -> None:
        """Times the techniques in turns until ``end``; the shortest time of each counts."""
        for turn in range(2, ROUNDS + 1):
            for number, (technique, ledger) in enumerate(ledgers.items(), 1):
                if time.monotonic() > end:
                    return
                self.say(f"timing {number} of {len(ledgers)}: {technique.name}, turn {turn} of {ROUNDS}")
                step.use(technique)
                seconds = self.failures.attempt(technique, step.seconds)
                if seconds is not None:
                    ledger.take(min(ledger.seconds, seconds))


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


def affordable_rows(step_time: Callable[[int], float], rows: int, limit: float) -> int:
    """Returns the largest batch predicted to stay within ``limit`` seconds: all ``rows``, or a power of two.

    ``step_time`` returns the seconds of a step by rows; it is called with about a sixteenth of ``rows`` and, if that is
    within the limit, an eighth.
    """
    first = max(1, rows // 16)
    if rows <= first:
        return rows
    short = step_time(first)
    if short > limit:
        return _power_of_two(int(first * limit / short))
    long = step_time(2 * first)
    slope = max(long - short, 0.05 * long) / first
    affordable = 2 * first + int((limit - long) / slope)
    if affordable >= rows:
        return rows
    return _power_of_two(affordable)


def _power_of_two(rows: int) -> int:
    """Returns the largest power of two of at most ``rows``, at least 1."""
    return 1 << (max(1, rows).bit_length() - 1)


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
