"""``econmt profile``: bytes and milliseconds of a training step, by layer and technique."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from econmt.api.commands import warn_of_slowness
from econmt.budget.planner import describe
from econmt.checkpoint.tensor_files import write_text
from econmt.cli.workload import Workload, find_workload
from econmt.config import limits
from econmt.config.recipe import Recipe
from econmt.data.files import notice, writing
from econmt.data.progress_bars import Say, status_line
from econmt.engine.communicator import rows_of_share
from econmt.engine.devices import check_device_name, reproducible, resolve_device
from econmt.engine.machine import describe_machine
from econmt.engine.outside_memory import ASSUMED, limit_workspaces, outside_meter
from econmt.engine.parameters import fix_parameters
from econmt.engine.precision import Precision, precision_of_run
from econmt.engine.threads import threads_for
from econmt.errors import InputError
from econmt.estimate.byte_budget import budget_bytes, size_text
from econmt.estimate.fit import Fit, demand, fit_all
from econmt.estimate.profiling import Failures, Profile, Step, TechniqueProfiler, kernels
from econmt.estimate.report.data import fit_data, report_data
from econmt.estimate.report.page import page
from econmt.estimate.report.report import Report, fit_table, print_report, row_text
from econmt.estimate.techniques import Technique, estimate, estimator, techniques
from econmt.model import Implementations
from econmt.options.option_groups import option
from econmt.options.shared_options import BatchChoice, RunRecipe, bytes_of, check_writable
from econmt.parallel.simulated_rank import ALONE, Rank, ranks_that_differ
from econmt.training.choice import settle
from econmt.training.pipelines import check_ranks
from econmt_memory.account.comparison import compare
from econmt_memory.report.tables import print_table, table_console
from econmt_ops.dispatch.rule import rules_only

FITTED = ("reference", "all", "reference, bfloat16", "all, bfloat16")
"""Techniques whose largest batches --fit --compare prints."""

_PASSES = 4
"""Maximum number of measurements of the ops: each completes what a busy machine has left out of the one before."""


@dataclass(frozen=True)
class StepOptions:
    """Choice between measuring steps, predicting them, and looking for the largest batch."""

    estimated: bool = option(
        False, "--estimate", help="Predict memory without running a step; cuda needs no GPU then."
    )
    measured: bool = option(
        False, "--measure", help="Run complete steps however long they take, if they fit into memory."
    )
    budget: str | None = option(
        None,
        "--fit",
        help="Find the largest batch of each bucket that fits into these bytes, e.g. 8GiB.",
        metavar="BYTES",
    )
    compare: bool = option(
        False, help="Compare techniques, one row each; compiled ones if an op of the recipe is compiled."
    )
    processes: int | None = option(
        None,
        help="Number of processes that train together; the figures are those of one of them.",
        min=1,
        max=limits.PROCESSES,
    )


@dataclass(frozen=True)
class ProfileOutput:
    """Output of a profile."""

    as_json: bool = option(False, "--json", help="Print the report as one JSON object.")
    trace: Path | None = option(None, help="Write a PyTorch profiler trace of a step (chrome://tracing).")
    html: Path | None = option(None, help="Write an HTML page with charts.")
    diff: bool = option(
        False,
        "--diff",
        help="Show what changed between two files of --json or of econmt_memory, given in place of recipe and keys.",
    )


def profile(
    context: typer.Context, recipe: RunRecipe, batch: BatchChoice, steps: StepOptions, output: ProfileOutput
) -> None:
    """Show the bytes and milliseconds of a training step by layer; compare techniques; predict memory.

    \b
    Example:
      econmt profile iwslt --compare --html iwslt.html
      econmt profile iwslt --device cuda --estimate
      econmt profile iwslt --fit 8GiB --device cuda
      econmt profile iwslt --processes 2 parallel.shard_optimizer=true
      econmt profile --diff before.json after.json
    """
    if output.diff:
        _print_difference(recipe)
        return
    budget = _check_options(steps, output)
    settings = recipe.load()
    step = _step_to_profile(recipe, settings, batch, steps, output)
    rows, notes = (step.compared(), []) if steps.compare else step.of_run()
    command = shlex.join(["econmt", *context.obj])
    if budget is not None:
        if steps.compare:
            rows = [each for each in rows if each.name in FITTED]
        outside = ASSUMED.total if step.device.type == "cuda" else 0
        if outside:
            notes.append(
                f"{size_text(outside)} of the {size_text(budget)} are assumed to be outside of PyTorch"
            )
        fits = step.fits(rows, max(0, budget - outside))
        if output.as_json:
            record: dict[str, Any] = {"recipe": settings.name, "command": command, "device": str(step.device)}
            record |= {"machine": describe_machine(str(step.device)), "fit": fit_data(fits, budget)}
            print(json.dumps(record, indent=1))
        else:
            precision = "" if steps.compare else f", {step.precision.name}"
            _print_fits(fits, budget, step, precision, notes)
        return
    workload, device = step.workload, str(step.device)
    notes, machine = [*workload.notes, *notes], describe_machine(device)
    report = Report(settings.name, command, workload.shape, workload.task.sizes, device, "", notes, machine)
    failures = step.measure(report, rows, output.trace, patient=steps.measured)
    _print(report, output)
    failures.raise_first()


def _print_difference(files: RunRecipe) -> None:
    """Prints what changed between two files, which are given in place of a recipe and its keys."""
    others = files.overrides or []
    if len(others) != 1:
        raise InputError("--diff compares two files; give their names: econmt profile --diff A.json B.json")
    try:
        comparison = compare(files.recipe, others[0])
    except ValueError as error:
        raise InputError(str(error)) from None
    print_table(table_console(), comparison.table().for_terminal())


def _print(report: Report, output: ProfileOutput) -> None:
    """Prints a report as text or JSON, and writes its page; names the files that were written."""
    if output.html is not None:
        with writing(output.html):
            write_text(output.html, page(report))
    if output.as_json:
        print(json.dumps(report_data(report), indent=1))
        return
    print_report(report, table_console())
    for name, path in (("page", output.html), ("trace", report.trace)):
        if path is not None:
            print(f"{name}: {path}")


def _print_fits(
    fits: Mapping[Technique, Sequence[Fit]],
    budget: int,
    step: ProfiledStep,
    precision: str,
    notes: Sequence[str],
) -> None:
    """Prints the largest batches as a table."""
    console, ranks = table_console(), step.ranks[0].size
    name = step.workload.task.recipe.name
    lines = [f"{name}, {step.device}{precision}; bytes are estimated, every row is full", *notes]
    if ranks > 1:
        lines.append(f"rows of all {ranks} ranks together, bytes of the one that holds the most")
    console.print("\n".join(lines), highlight=False, markup=False)
    print_table(console, fit_table(fits, budget).for_terminal())


@dataclass(frozen=True)
class ProfiledStep:
    """Training step of a recipe that is measured or predicted.

    Attributes:
        workload: the task and the batch of one rank. ranks: the ranks that differ in what they hold.
        predicted: True if no step is run.
        threads: CPU threads; None: those that are set.
    """

    workload: Workload
    ranks: Sequence[Rank]
    device: torch.device
    predicted: bool
    threads: int | None
    precision: Precision

    def measure(
        self, report: Report, rows: Sequence[Technique], trace: Path | None, *, patient: bool
    ) -> Failures:
        """Measures or predicts techniques into a report, as far as nothing fails and the user does not interrupt.

        Args:
            report: The report; each of several techniques is also told as soon as it is done.
            rows: Techniques, the reference first if there are several.
            trace: File for the trace of a step as the recipe runs it; None: no trace.
            patient: True to measure however long it takes.
        """
        failures, task, shape = Failures(), self.workload.task, self.workload.shape
        with status_line() as say, reproducible(self.device, self.threads), rules_only():  # as a run
            try:
                rank = self.ranks[0]
                if len(self.ranks) > 1:
                    report.ranks = [
                        estimate(task, rows[0], shape, self.device.type, each) for each in self.ranks
                    ]
                    rank = self.ranks[report.ranks.index(max(report.ranks, key=demand))]
                for profile in self.profiles(rows, rank, say, failures, patient=patient):
                    report.profiles.append(profile)
                    if len(rows) > 1:
                        notice(row_text(profile))
                timed = any(each.times is not None for each in report.profiles)
                on_gpu = self.device.type == "cuda" and timed
                technique = self.of_run()[0][0] if len(rows) > 1 and (trace or on_gpu) else rows[0]
                if trace is not None:
                    failures.attempt(technique, self.trace, technique, report.profiles, trace, rank, say)
                    report.trace = None if technique in failures.errors else trace
                if on_gpu:
                    step = task, technique, shape, self.device, say, rank
                    report.kernels = failures.attempt(technique, kernels, *step) or []
            except KeyboardInterrupt:
                if not report.profiles:
                    raise
                failures.interrupted = True
        report.profiles = [each for each in report.profiles if each.technique not in failures.errors]
        report.how = _how(report.profiles, self.predicted)
        report.notes += failures.notes
        return failures

    def of_run(self) -> tuple[list[Technique], list[str]]:
        """Returns the technique of a run of the recipe on this machine, and notes on it, a sentence each.

        A run with a byte budget leaves open what its plan chooses, and follows the rules; so does a prediction for a
        GPU.
        """
        task = self.workload.task
        in_recipe = Implementations.of(task.recipe.ops)
        technique = Technique("as in the recipe", in_recipe, self.precision)
        by_rule = self.predicted and self.device.type != "cpu"
        if task.recipe.training.memory_budget is not None or by_rule or "auto" not in in_recipe:
            return [technique], []
        with torch.device("meta"):
            size = sum(parameter.nbytes for parameter in task.build_model().parameters())
        if self.predicted and 2 * size > budget_bytes("auto", self.device, 0):  # the weights need not fit
            return [technique], []
        with status_line() as say, reproducible(self.device, self.threads):
            say("finding out which ops are fastest, as a run does when it begins")
            chosen, why = settle(
                task,
                lambda: task.build_model().to(self.device),
                self.workload.frequent,
                self.device,
                self.precision,
                passes=_PASSES,
            )
        notes = [f"Ops that auto means here: {describe(chosen)} ({why})."]
        return [technique._replace(implementations=chosen)], notes

    def compared(self) -> list[Technique]:
        """Returns the techniques of --compare."""
        task, kind = self.workload.task, self.device.type
        compiled = not self.predicted and "compiled" in Implementations.of(task.recipe.ops)
        with rules_only(kind) if self.predicted else nullcontext():
            rows = techniques(task.recipe.ops.stash, kind, compiled)
        # A language model's layers are run as an encoder's.
        return [each for each in rows if task.translates or each.name != "+ decoder"]

    def profiles(
        self, rows: Sequence[Technique], rank: Rank, say: Say, failures: Failures, *, patient: bool
    ) -> Iterator[Profile]:
        """Yields profiles of techniques, measured or predicted; ``patient`` measures however long it takes."""
        task, shape, device = self.workload.task, self.workload.shape, self.device
        if not self.predicted:
            profiler = TechniqueProfiler(task, rows, shape, device, say, rank, failures)
            yield from profiler.profiles(patient=patient)
            return
        predict = estimator(task, shape, device.type, say, rank)
        for technique in rows:
            yield Profile(technique, shape, predict(technique), measured=False)

    def trace(
        self, technique: Technique, profiles: Sequence[Profile], path: Path, rank: Rank, say: Say
    ) -> None:
        """Writes the trace of a step of the shape that was timed."""
        shape = next((each.timed_shape for each in profiles if each.timed_shape is not None), None)
        if shape is None:
            problem = "not even one row fits the free memory, so there is no step to trace"
            raise InputError(f"--trace {path}: {problem}")
        say(f"tracing {shape}")
        step = Step(self.workload.task, shape, self.device, rank)
        step.use(technique)
        step.trace(path)

    def fits(self, rows: Sequence[Technique], budget: int) -> dict[Technique, list[Fit]]:
        """Finds the largest batch, of all ranks together, of each bucket by each technique."""
        task, ranks = self.workload.task, self.ranks
        replicas = ranks[0].size // task.recipe.parallel.pipeline if ranks[0].size > 1 else 1
        fits: dict[Technique, list[Fit]] = {}
        buckets = self.workload.buckets[::-1]
        start = self.workload.shape.rows
        with status_line() as say:
            for technique in rows:
                done = len(fits) * len(buckets)
                results = fit_all(task, technique, buckets, budget, self.device.type, start, ranks)
                largest: list[Fit] = []
                for number, (source, target) in enumerate(buckets, done + 1):
                    progress = f"bucket {number} of {len(rows) * len(buckets)}"
                    say(f"{progress}: {source} x {target}, {technique.name}")
                    largest.insert(0, next(results))
                start = max(1, largest[-1].rows)
                fits[technique] = [each._replace(rows=each.rows * replicas) for each in largest]
        return fits


def _step_to_profile(
    recipe: RunRecipe, settings: Recipe, batch: BatchChoice, steps: StepOptions, output: ProfileOutput
) -> ProfiledStep:
    """Returns the step that the options describe; raises InputError if it cannot be run."""
    stages = settings.parallel.pipeline
    size = steps.processes or stages
    check_ranks(settings, size)
    if stages > 1 and (steps.measured or output.trace is not None):
        raise InputError(
            f"parallel.pipeline {stages}: what its stages hold is predicted, no step is run; leave out --measure and "
            "--trace"
        )
    predicted = steps.estimated or steps.budget is not None or stages > 1
    device = _device(settings.training.device, settings.training.precision, predicted)
    workload = find_workload(recipe.recipe, settings, batch, recipe.data_dir)
    ranks: Sequence[Rank] = [ALONE]
    if size > 1:
        workload, ranks = _of_one_rank(workload, size, device.type)
    if predicted and device.type != "cpu":
        precision = precision_of_run(settings, device)
        return ProfiledStep(workload, ranks, device, predicted, settings.training.threads, precision)
    threads = threads_for(settings.training.threads, device, settings.model.widest).number
    with reproducible(device, threads):
        if device.type == "cpu" and not predicted:
            warn_of_slowness()
        precision = precision_of_run(settings, device)
    return ProfiledStep(workload, ranks, device, predicted, threads, precision)


def _of_one_rank(workload: Workload, size: int, device: str) -> tuple[Workload, list[Rank]]:
    """Returns the workload of one of ``size`` ranks, and the ranks that differ in what they hold."""
    settings = workload.task.recipe.parallel
    rows = workload.shape.rows
    shape = workload.shape._replace(rows=rows_of_share(rows, size // settings.pipeline))
    notes = [f"Of one of {size} ranks, which has {shape.rows:,} of the {rows:,} rows."]
    if settings.pipeline > 1:
        notes.append(
            f"Its layers are divided over {settings.pipeline} ranks by their weights; a run divides them by times."
        )
    with torch.device("meta"):
        model = workload.task.build_model()
    fix_parameters(model, workload.task.recipe.training)
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    ranks = ranks_that_differ(settings, size, sizes, device)
    return workload._replace(shape=shape, notes=[*workload.notes, *notes]), ranks


def _check_options(steps: StepOptions, output: ProfileOutput) -> int | None:
    """Refuses files that cannot be written; returns the bytes of --fit."""
    check_writable(output.trace, output.html)
    if output.trace and output.html and output.trace.resolve() == output.html.resolve():
        raise InputError(f"{output.html}: --trace and --html cannot be one file; give two names")
    return bytes_of("--fit", steps.budget)


def _device(name: str, precision: str, predicted: bool) -> torch.device:
    check_device_name(name)
    if name.partition(":")[0] == "cuda":
        if predicted:
            return torch.device("cuda")
        if not torch.cuda.is_available():
            raise InputError(
                f"device '{name}': torch sees no GPU here; add --estimate to predict without one, or give --device cpu"
            )
    device = resolve_device(name)
    if device.type == "cuda" and not predicted:
        limit_workspaces(precision)
        outside_meter(device)  # begins before anything else uses the GPU
    return device


def _how(profiles: Sequence[Profile], predicted: bool) -> str:
    """Returns a sentence that tells whether the figures are measured or predicted."""
    guessed = [profile for profile in profiles if not profile.measured]
    if predicted:
        return "Bytes: estimated with fake tensors; no step was run."
    if not guessed:
        graphs = any(profile.bytes.graphs is not None for profile in profiles)
        return "Bytes and times: measured" + ("; times of steps are those of CUDA graphs." if graphs else ".")
    names = ", ".join(profile.technique.name for profile in guessed)
    if len(guessed) < len(profiles):
        lack = "the device's memory is too small" if guessed[0].bytes.device == "cuda" else "no time was left"
        return f"Bytes and times: measured; {lack} for {names}, whose bytes are estimated."
    timed = profiles[0].timed_shape
    if timed is None:
        return "Bytes: estimated with fake tensors; no step fits the free memory."
    return (
        f"Bytes: estimated with fake tensors. Times: measured with {timed.rows} of {profiles[0].shape.rows} rows; the "
        "whole batch does not fit the free memory or would take minutes (--measure runs it if it fits)."
    )
