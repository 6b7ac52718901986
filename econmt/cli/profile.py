"""``econmt profile``: where the bytes and the milliseconds of a training step go."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from econmt.checkpoint.tensor_files import write_text
from econmt.cli.computing import warn_of_slowness
from econmt.cli.consoles import table_console
from econmt.cli.options import (
    BucketOption,
    DataDirOption,
    OverridesArgument,
    PairsOption,
    RecipeArgument,
    RecipeDeviceOption,
    RecipeThreadsOption,
    as_overrides,
    bytes_of,
    check_writable,
    refuse_idle,
)
from econmt.cli.workload import Found, find_workload
from econmt.config import limits
from econmt.config.recipe import Recipe, load_recipe
from econmt.data.files import writing
from econmt.data.progress_bars import status_line
from econmt.data.tables import print_table
from econmt.engine.communicator import rows_of_share
from econmt.engine.devices import check_device_name, reproducible, resolve_device
from econmt.engine.freeze import fix_parameters
from econmt.engine.precision import Precision, precision_of_run
from econmt.engine.threads import threads_for
from econmt.errors import InputError
from econmt.memory.estimate.techniques import Say, Technique, estimate, estimates, techniques
from econmt.memory.measure.byte_budget import budget_bytes
from econmt.memory.measure.kernels import KernelTimes
from econmt.memory.measure.ledger import Ledger
from econmt.memory.measure.machine import describe_machine
from econmt.memory.plan.fit import Fit, demand, fit_all
from econmt.memory.plan.planner import describe
from econmt.memory.profiling import Failures, Profile, Step, kernels
from econmt.memory.profiling import profile as measure_profile
from econmt.memory.report.data import fit_data, report_data
from econmt.memory.report.page import page
from econmt.memory.report.report import Report, fit_table, print_report
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank, ranks_that_differ
from econmt.training.choice import settle
from econmt.training.pipelines import check_ranks
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.dispatch.rule import rules_only

FITTED = ("reference", "all", "all, bfloat16")
"""The techniques whose largest batches --fit --compare tells."""

_PASSES = 4
"""Most measurements of the ops: another one completes what a busy machine has left out, and is remembered for runs."""


def profile(
    context: typer.Context,
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    bucket: BucketOption = None,
    batch: PairsOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="One row a technique.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a PyTorch profiler trace of a step (chrome://tracing)."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one page with charts, for a browser."),
    ] = None,
    device: RecipeDeviceOption = None,
    threads: RecipeThreadsOption = None,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="Predict; no step is run, and no GPU is needed for cuda.")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--measure", help="Run whole steps however long they take, if memory allows.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option("--fit", metavar="BYTES", help="Largest batches in e.g. 8GiB."),
    ] = None,
    data_dir: DataDirOption = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=limits.PROCESSES, help="What one of so many that train together holds."),
    ] = None,
) -> None:
    """Say where the bytes and the milliseconds of a training step go, by layer; compare techniques; predict.

    \b
    Example:
      econmt profile iwslt --compare --html iwslt.html
      econmt profile iwslt --device cuda --estimate
      econmt profile iwslt --fit 8GiB --device cuda
      econmt profile iwslt --processes 2 parallel.shard_optimizer=true
    """
    size = _check(context, estimated, measured, budget, trace, html)
    said = {"training.device": device, "training.threads": threads}
    loaded = load_recipe(recipe, as_overrides(overrides, said))
    count_of_ranks = _ranks(loaded, processes, measured or trace is not None)
    predicted = estimated or size is not None or loaded.parallel.pipeline > 1
    where = _device(loaded.training.device, predicted)
    whole = find_workload(recipe, loaded, bucket, batch, data_dir)
    found, ranks = _of_ranks(whole, count_of_ranks, where.type)
    count, precision = _settled(loaded, where, predicted)
    own, why = _own(whole, where, count, precision, predicted)
    rows = _compared(found, where, predicted) if compare else [own]
    notes = [] if compare else why
    command = shlex.join(["econmt", *context.obj])
    if size is not None:
        named = [each for each in rows if not compare or each.name in FITTED]
        name = "" if compare else f", {str(precision).removeprefix('torch.')}"
        fits = _fit(found, named, where, size, ranks)
        place = f"{where}{name}"
        _print_fits(fits, size, loaded.name, place, notes, command if as_json else None, ranks[0].size)
        return
    failures = Failures()
    ledgers, profiles, seen = _looked_at(
        found, ranks, own, rows, where, count, failures, predicted=predicted, measured=measured, trace=trace
    )
    report = Report(
        loaded.name,
        command,
        found.shape,
        found.task.sizes,
        str(where),
        _how(profiles, predicted),
        [*found.notes, *notes, *failures.notes],
        describe_machine(str(where)),
        profiles,
        seen,
        ledgers,
    )
    _print(report, as_json, html, None if own in failures.errors else trace)
    failures.raise_first()


def _print(report: Report, as_json: bool, html: Path | None, trace: Path | None) -> None:
    """Prints a report as text or JSON, and writes its page; names the files that were written."""
    if html is not None:
        with writing(html):
            write_text(html, page(report))
    if as_json:
        print(json.dumps(report_data(report), indent=1))
        return
    print_report(report, table_console())
    for name, path in (("page", html), ("trace", trace)):
        if path is not None:
            print(f"{name}: {path}")


def _looked_at(
    found: Found,
    ranks: Sequence[Rank],
    own: Technique,
    rows: Sequence[Technique],
    where: torch.device,
    threads: int | None,
    failures: Failures,
    *,
    predicted: bool,
    measured: bool,
    trace: Path | None,
) -> tuple[list[Ledger], list[Profile], list[KernelTimes]]:
    """Ledgers of ranks that differ, profiles of the one that holds the most, and the kernels of its step."""
    with status_line() as say, reproducible(where, threads), rules_only():  # as a run
        ledgers: list[Ledger] = []
        if len(ranks) > 1:
            ledgers = [estimate(found.task, own, found.shape, where.type, rank) for rank in ranks]
        rank = ranks[ledgers.index(max(ledgers, key=demand))] if ledgers else ranks[0]
        profiles = _profiles(found, rows, where, predicted, measured, say, rank, failures)
        if trace is not None:
            failures.attempt(own, _trace, found, own, where, profiles, trace, say, rank)
        kernels_seen = failures.attempt(own, _kernels, found, own, where, profiles, say, rank)
        return ledgers, profiles, kernels_seen or []


def _print_fits(
    fits: Mapping[str, Sequence[Fit]],
    size: int,
    recipe: str,
    where: str,
    notes: Sequence[str],
    json_of: str | None,
    ranks: int,
) -> None:
    """The largest batches as a table, or as JSON that names the command ``json_of``."""
    if json_of is None:
        console = table_console()
        lines = [f"{recipe}, {where}; bytes are estimated, every row is full", *notes]
        if ranks > 1:
            lines.append(f"rows of all {ranks} ranks together, bytes of the one that holds the most")
        console.print("\n".join(lines), highlight=False, markup=False)
        print_table(console, fit_table(fits, size).for_terminal())
        return
    device = where.split(",")[0]
    record: dict[str, Any] = {"recipe": recipe, "command": json_of, "device": device}
    print(json.dumps(record | {"machine": describe_machine(device), "fit": fit_data(fits, size)}, indent=1))


def _ranks(recipe: Recipe, processes: int | None, runs: bool) -> int:
    """Returns the number of ranks that train the recipe; ``runs``: True if a whole step is to run.

    Raises:
        InputError: they make no pipelines, or their step cannot be run.
    """
    stages = recipe.parallel.pipeline
    check_ranks(recipe, processes or stages)
    if stages > 1 and runs:
        raise InputError(
            f"parallel.pipeline {stages}: what its stages hold is predicted, no step is run; leave out --measure and "
            "--trace"
        )
    return processes or stages


def _of_ranks(found: Found, size: int, device: str) -> tuple[Found, list[Rank]]:
    """The workload of one of so many ranks, and which of them differ in what they hold."""
    settings = found.task.recipe.parallel
    if size == 1:
        return found, [ALONE]
    rows = found.shape.rows
    own = found.shape._replace(rows=rows_of_share(rows, size // settings.pipeline))
    notes = [f"Of one of {size} ranks, which has {own.rows:,} of the {rows:,} rows."]
    if settings.pipeline > 1:
        notes.append(
            f"Its layers are divided over {settings.pipeline} ranks by their weights; a run divides them by times."
        )
    with torch.device("meta"):
        model = found.task.build_model()
    fix_parameters(model, found.task.recipe.training)
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    ranks = ranks_that_differ(settings, size, sizes, device)
    return found._replace(shape=own, notes=[*found.notes, *notes]), ranks


def _compared(found: Found, where: torch.device, predicted: bool) -> list[Technique]:
    """The techniques of --compare."""
    with rules_only(where.type) if predicted else nullcontext():
        rows = techniques(found.task.recipe.ops.stash, where.type, has_compiler() and not predicted)
    # A language model's layers are run as an encoder's.
    return [each for each in rows if found.task.translates or each.name != "+ decoder"]


def _settled(recipe: Recipe, where: torch.device, predicted: bool) -> tuple[int | None, torch.dtype]:
    """Returns the number of threads and the precision."""
    if predicted and where.type != "cpu":
        return recipe.training.threads, precision_of_run(recipe, where).dtype
    count = threads_for(recipe.training.threads, where, recipe.model.widest).number
    with reproducible(where, count):
        if where.type == "cpu" and not predicted:
            warn_of_slowness()
        return count, precision_of_run(recipe, where).dtype


def _own(
    found: Found, where: torch.device, threads: int | None, precision: torch.dtype, predicted: bool
) -> tuple[Technique, list[str]]:
    """The technique of a run of the recipe on this machine, and what to say of it, a sentence each.

    A run with a byte budget leaves open what its plan chooses, and follows the rules; so does a prediction for a GPU.
    """
    recipe, task = found.task.recipe, found.task
    given = Implementations.of(recipe.ops)
    own = Technique("as in the recipe", given, precision)
    if (
        recipe.training.memory_budget is not None
        or (predicted and where.type != "cpu")
        or "auto" not in given
    ):
        return own, []
    with torch.device("meta"):
        size = sum(parameter.nbytes for parameter in task.build_model().parameters())
    if predicted and 2 * size > budget_bytes("auto", where, 0):  # a prediction needs no room for the weights
        return own, []
    with status_line() as say, reproducible(where, threads):
        say("finding out which ops are fastest, as a run does when it begins")
        chosen, why = settle(
            task,
            lambda: task.build_model().to(where),
            found.frequent,
            where,
            Precision(precision),
            passes=_PASSES,
        )
    return own._replace(implementations=chosen), [f"Ops that auto means here: {describe(chosen)} ({why})."]


def _profiles(
    found: Found,
    rows: Sequence[Technique],
    where: torch.device,
    predicted: bool,
    measured: bool,
    say: Say,
    rank: Rank,
    failures: Failures,
) -> list[Profile]:
    """Profiles of some techniques: measured, or if ``predicted`` without running a step."""
    if not predicted:
        return measure_profile(
            found.task, rows, found.shape, where, patient=measured, say=say, rank=rank, failures=failures
        )
    ledgers = estimates(found.task, rows, found.shape, where.type, say, rank)
    return [
        Profile(technique, found.shape, ledger, measured=False)
        for technique, ledger in zip(rows, ledgers, strict=True)
    ]


def _trace(
    found: Found,
    own: Technique,
    where: torch.device,
    profiles: Sequence[Profile],
    path: Path,
    say: Say,
    rank: Rank,
) -> None:
    """Write the trace of a step of the shape that was timed."""
    shape = next((each.timed_shape for each in profiles if each.timed_shape is not None), None)
    if shape is None:
        raise InputError(
            f"--trace {path}: not even one row fits the free memory, so there is no step to trace"
        )
    say(f"tracing {shape}")
    step = Step(found.task, shape, where, rank)
    step.use(own)
    step.trace(path)


def _kernels(
    found: Found,
    own: Technique,
    where: torch.device,
    profiles: Sequence[Profile],
    say: Say,
    rank: Rank,
) -> list[KernelTimes]:
    """The kernels of steps on a GPU, if one was timed there."""
    timed = where.type == "cuda" and any(each.times is not None for each in profiles)
    return kernels(found.task, own, found.shape, where, say, rank) if timed else []


def _fit(
    found: Found, rows: Sequence[Technique], where: torch.device, budget: int, ranks: Sequence[Rank]
) -> dict[str, list[Fit]]:
    """The largest batch, of all ranks together, of each bucket by each technique."""
    replicas = ranks[0].size // found.task.recipe.parallel.pipeline if ranks[0].size > 1 else 1
    fits: dict[str, list[Fit]] = {}
    buckets = found.buckets[::-1]
    start = found.shape.rows
    with status_line() as say:
        for technique in rows:
            done = len(fits) * len(buckets)
            looks = fit_all(found.task, technique, buckets, budget, where.type, start, ranks)
            largest: list[Fit] = []
            fits[technique.name] = largest
            for number, (source, target) in enumerate(buckets, done + 1):
                say(f"bucket {number} of {len(rows) * len(buckets)}: {source} x {target}, {technique.name}")
                largest.insert(0, next(looks))
            start = max(1, largest[-1].rows)
            fits[technique.name] = [each._replace(rows=each.rows * replicas) for each in largest]
    return fits


def _check(
    context: typer.Context,
    estimated: bool,
    measured: bool,
    budget: str | None,
    trace: Path | None,
    html: Path | None,
) -> int | None:
    """Refuse options that do not go together, and files that cannot be written; the bytes of the budget.

    Raises:
        InputError: naming them.
    """
    if estimated and measured:
        raise InputError("--estimate runs no step and --measure runs whole ones; give one of them")
    if trace is not None and (estimated or budget is not None):
        raise InputError("--trace needs a real step; leave out --estimate and --fit")
    if budget is not None and (html is not None or measured):
        raise InputError("--fit prints a table of estimates; leave out --html and --measure")
    if budget is not None:
        refuse_idle(context, "is what --fit finds; leave one of them out", "batch")
    check_writable(trace, html)
    if trace is not None and html is not None and trace.resolve() == html.resolve():
        raise InputError(f"{html}: --trace and --html cannot be one file; give two names")
    return bytes_of("--fit", budget)


def _device(name: str, predicted: bool) -> torch.device:
    check_device_name(name)
    if name.partition(":")[0] == "cuda":
        if predicted:
            return torch.device("cuda")
        if not torch.cuda.is_available():
            raise InputError(
                f"device '{name}': torch sees no GPU here; add --estimate to predict without one, or give --device cpu"
            )
    return resolve_device(name)


def _how(profiles: Sequence[Profile], predicted: bool) -> str:
    """Says whether the figures are measured or predicted."""
    guessed = [profile for profile in profiles if not profile.measured]
    if predicted:
        return "Bytes: estimated with fake tensors; no step was run."
    if not guessed:
        graphs = any(profile.bytes.graphs is not None for profile in profiles)
        return "Bytes and times: measured" + ("; times of steps are those of CUDA graphs." if graphs else ".")
    if len(guessed) < len(profiles):
        names = ", ".join(profile.technique.name for profile in guessed)
        return f"Bytes and times: measured; the device's memory is too small for {names}, whose bytes are estimated."
    timed = profiles[0].timed_shape
    if timed is None:
        return "Bytes: estimated with fake tensors; no step fits the free memory."
    return (
        f"Bytes: estimated with fake tensors. Times: measured with {timed.rows} of {profiles[0].shape.rows} rows; the "
        "whole batch does not fit the free memory or would take minutes (--measure runs it if it fits)."
    )
