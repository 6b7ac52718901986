"""``econmt train``: trains a model from a recipe, or resumes its run."""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import typer
from rich.console import Console

from econmt import errors
from econmt.budget.planner import plan_table
from econmt.budget.run_budget import first_plan
from econmt.checkpoint.checkpoints import load_state
from econmt.checkpoint.folder import ModelFolder
from econmt.cli.doctor import EXTRAS
from econmt.config import limits
from econmt.config.optimizer import METRICS
from econmt.config.recipe import Recipe, TextData
from econmt.data.batching.batches import bucket_rule, training_batches
from econmt.data.batching.buckets import assign_buckets
from econmt.data.batching.store import PreparedData, prepare, store_folder
from econmt.data.files import cache_folder
from econmt.data.text.catalog import no_downloads
from econmt.data.text.filters import left_out
from econmt.engine.communicator import Communicator
from econmt.engine.devices import resolve_device
from econmt.engine.outside_memory import limit_workspaces
from econmt.engine.precision import precision_of_run
from econmt.errors import InputError, printable
from econmt.options.option_groups import option
from econmt.options.shared_options import RunRecipe, VerifyOption
from econmt.parallel.processes import joined
from econmt.parallel.rank_environment import RankEnvironment, rank_environment, take_own_gpu
from econmt.parallel.simulated_rank import Rank, SimulatedRank
from econmt.tasks.registry import make_task
from econmt.training.hooks import program_hook
from econmt.training.interrupts import Interrupted
from econmt.training.results import RunResults
from econmt.training.run import Outcome, run_recipe
from econmt_memory.report.ledger_tables import ledger_table
from econmt_memory.report.tables import ReportTable, print_table, table_console

LONGEST_SAMPLE = 60
"""Characters of a sample sentence that is quoted whole."""


def train(
    context: typer.Context,
    *,
    recipe: RunRecipe,
    output: str | None = option(None, "--output", "-o", help="Model folder, instead of the recipe's output."),
    overwrite_output: bool = option(
        False,
        "--overwrite-output",
        "--fresh",
        help="Start a new run; an existing run in the folder is deleted.",
    ),
    resume_with_changes: bool = option(False, help="Resume although the recipe has changed."),
    verify: VerifyOption = False,
    validation_hook: str | None = option(
        None,
        help="Program that judges each checkpoint: it gets the translations of the validation text, one a line, and "
        "prints a figure last; for training.early_stopping.metric hook, higher is better.",
        metavar="PROGRAM",
    ),
    dry_run: bool = option(
        False, help="Read the text and describe the run; trains, writes and downloads nothing."
    ),
    processes: int | None = option(
        None,
        help="Number of processes on this host that train together, each with its own GPU or share of the cores.",
        min=1,
        max=limits.PROCESSES,
    ),
    max_restarts: int = option(
        0,
        help="Maximum number of times that all processes are restarted after one was lost.",
        min=0,
        max=limits.RESTARTS,
    ),
) -> None:
    """Train a model from a recipe. The same command resumes the run after any interruption.

    \b
    Example:
      econmt train multi30k training.batch.size=128 --output runs/m1
    """
    environment = _rank_environment(processes)
    loaded = recipe.load({"output": output})
    search = recipe.search_path
    hook = None if validation_hook is None else program_hook(validation_hook)
    talk = Console(stderr=True, highlight=False, quiet=errors.quiet)
    results = table_console()
    if dry_run:
        folder, store = ModelFolder(loaded.output), store_folder(loaded)
        folder.check(overwrite=overwrite_output, last=loaded.training.max_updates)
        folder.check_writable()
        with _scratch() as scratch:
            bars = talk.is_terminal
            prepared = prepare(loaded, store, search, show_progress=bars, verify=verify, instead=scratch)
            _describe(loaded, prepared, results, processes or 1)
        return
    if environment is None and processes is not None and (processes > 1 or max_restarts):
        from econmt.parallel.launch import launch  # one process does not import PyTorch's elastic agent

        raise typer.Exit(launch(context.obj, processes, max_restarts))
    try:
        with communicator_of(environment, loaded) as communicator:
            outcome = run_recipe(
                loaded,
                search,
                console=talk,
                # Restarted processes resume the run that was started anew before.
                overwrite_output=overwrite_output and (environment is None or environment.restarts == 0),
                resume_with_changes=resume_with_changes,
                verify=verify,
                communicator=communicator,
                hook=hook,
            )
    except Interrupted as interrupted:
        errors.talk(f"econmt: {printable(interrupted)}")
        raise typer.Exit(interrupted.exit_code) from interrupted
    if not communicator.is_rank_zero:
        return
    _print_outcome(outcome, loaded, results)
    samples = () if outcome.results is None else outcome.results.samples
    steps = commands_for(loaded, min((each.source for each in samples), key=len, default="A sentence."))
    talk.print("\n  ".join(["with this model:", *steps]), soft_wrap=True, markup=False)


def _print_outcome(outcome: Outcome, recipe: Recipe, console: Console) -> None:
    """Prints the results of a run, or that it had ended before, on standard output."""
    if outcome.results is not None:
        _print_results(outcome.results, console)
    else:
        ended = outcome.training
        end = f"finished at update {ended.update} ({ended.reason}), best checkpoint {ended.best_update}"
        print(f"{recipe.output}: {end}; nothing to do")
    sys.stdout.flush()  # before what follows on standard error


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yields a folder for prepared text, and lets the context write its caches beside it; both vanish at the end."""
    cache, before = cache_folder(), os.environ.get("ECONMT_CACHE")
    with tempfile.TemporaryDirectory(prefix="econmt-dry-run-") as folder:
        for file in cache.glob("*.json"):  # measurements, which are read as a run would read them
            shutil.copy(file, folder)
        os.environ["ECONMT_CACHE"] = folder
        try:
            with no_downloads():
                yield Path(folder) / "prepared"
        finally:
            del os.environ["ECONMT_CACHE"]
            if before is not None:
                os.environ["ECONMT_CACHE"] = before


def _rank_environment(processes: int | None) -> RankEnvironment | None:
    """Returns this process's rank environment, or None if it runs alone or is the launcher."""
    environment = rank_environment()
    if environment is not None and processes not in (None, environment.size):
        raise InputError(
            f"--processes {processes}: this is one of {environment.size} processes that were started already "
            "(WORLD_SIZE); leave it out"
        )
    return environment


def communicator_of(
    environment: RankEnvironment | None, recipe: Recipe
) -> AbstractContextManager[Communicator]:
    """Joins the processes that train together; without an environment it is this process alone."""
    if environment is None:
        return nullcontext(Communicator())
    limit_workspaces(recipe.training.precision)
    take_own_gpu(recipe.training.device, environment)
    return joined(environment, recipe.parallel, resolve_device(recipe.training.device))


def _print_results(results: RunResults, console: Console) -> None:
    """Prints the results of a run on standard output."""
    for number, sample in enumerate(results.samples, 1):
        print(f"source {number}:      {printable(sample.source)}")
        print(f"translation {number}: {printable(sample.translation)}")
        print(f"reference {number}:   {printable(sample.reference)}")
    print_table(console, ledger_table(results.ledger).for_terminal())
    for picture in results.pictures:
        print(f"picture: {printable(picture)}")
    for split, value in results.perplexities.items():
        print(f"{split} perplexity {value:.2f} of checkpoint {results.best_update}, a word")
    if not math.isnan(results.bleu):
        print(
            f"{results.corpus} BLEU {results.bleu:.2f} of checkpoint {results.best_update} ({results.signature})"
        )


def _intention(recipe: Recipe, prepared: PreparedData) -> list[str]:
    """Returns lines that describe the run that the command would start without --dry-run."""
    folder, training = ModelFolder(recipe.output), recipe.training
    commits = folder.commits()
    begin = "would start a new run"
    if commits:
        begin = f"would resume from update {load_state(folder, commits[-1]).update:,}"
    ends = [
        f"{name} {limit:,}"
        for name in ("max_updates", "max_epochs", "max_seconds")
        if (limit := getattr(training, name)) is not None
    ]
    patience = training.early_stopping.max_num_checkpoint_not_improved
    if patience is not None:
        metric = METRICS[training.early_stopping.metric].title
        ends.append(f"{patience} checkpoints without a better {metric}")
    files = ", ".join(recipe.data.train)
    unit = "lines" if isinstance(recipe.data, TextData) else "pairs"
    return [
        f"{recipe.name}: {begin} in {folder.path}, on {resolve_device(training.device)}",
        f"trains on {len(prepared.train):,} {unit} of {files}",
        *filter(None, [left_out(recipe, prepared.statistics)]),
        f"saves and validates every {training.checkpoint_interval:,} updates",
        f"ends at {' or '.join(ends)}" if ends else "ends only when it is stopped: no limit is set",
        "nothing is trained now; the same command without --dry-run trains",
        "",
    ]


def _describe(recipe: Recipe, prepared: PreparedData, console: Console, processes: int) -> None:
    """Prints a description of a run: model, parameters by layer, vocabulary, batches by shape, memory plan."""
    for line in _intention(recipe, prepared):
        print(line)
    torch.manual_seed(recipe.training.seed)
    task = make_task(recipe, prepared)
    model = task.build_model()
    print(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = task.layers(model)
    rows = [
        [layer, f"{sum(sizes[name] for name, its in layers.items() if its == layer):,}"]
        for layer in dict.fromkeys(layers.values())
    ]
    table = ReportTable(f"parameters: {sum(sizes.values()):,}", ("layer", "parameters"), rows)
    print_table(console, table.for_terminal())
    if task.translates:
        _describe_pairs(recipe, prepared, console)
    else:
        print(f"vocabulary: {task.sizes[0]:,}")
        tokens, batches = prepared.train.total_tokens, task.batches(prepared)
        print(
            f"{tokens:,} tokens in {batches.batches_per_epoch:,} batches an epoch, {batches.worst_batch().size_text}"
        )
    device = resolve_device(recipe.training.device)
    communicator = SimulatedRank(Rank(0, processes), recipe.parallel) if processes > 1 else Communicator()
    precision = precision_of_run(recipe, device)
    plan = first_plan(recipe, prepared, device, precision, communicator)
    if plan is not None:
        print_table(console, plan_table(plan, processes))


def _describe_pairs(recipe: Recipe, prepared: PreparedData, console: Console) -> None:
    """Prints the vocabularies of a translation recipe, and its batches by shape."""
    source, target = prepared.vocabularies.sides
    sizes = prepared.vocabularies.factor_sizes
    shared = " (one for both)" if source is target else ""
    more = f", {' and '.join(f'{size:,}' for size in sizes)} of source factors" if sizes else ""
    print(f"vocabulary: {source.size:,} source, {target.size:,} target{shared}{more}")
    batches = training_batches(recipe, prepared)
    print(f"{len(prepared.train):,} pairs in {batches.batches_per_epoch:,} batches an epoch")
    rule = bucket_rule(recipe, target.size)
    assigned = assign_buckets(prepared.train.source_lengths, prepared.train.target_lengths, rule)
    buckets = zip(assigned.shapes.tolist(), assigned.counts.tolist(), strict=True)
    rows = [[*map(str, shape), f"{pairs:,}"] for shape, pairs in buckets]
    headings = "source positions", "target positions", "pairs"
    print_table(console, ReportTable("buckets", headings, rows, left=()).for_terminal())


def commands_for(recipe: Recipe, sample: str) -> list[str]:
    """Returns lines that translate, serve and evaluate with a recipe's model; of a language model: write and score.

    ``sample`` is a source sentence, replaced if it is too long for a line.
    """
    model, store = shlex.quote(recipe.output), store_folder(recipe)
    split = "valid" if recipe.data.test is None else "test"
    if isinstance(recipe.data, TextData):
        text = _quoted(store / f"{split}.target.txt")
        return [
            f"econmt generate -m {model} --length 50",
            f"econmt score -m {model} -t {text} --score-type perplexity --total",
        ]
    streams = range(1, len(recipe.data.source_factors) + 1)
    factors = "".join(f" --input-factors {_quoted(store / f'{split}.factor{n}.txt')}" for n in streams)
    translated = _quoted(Path(f"{recipe.output}.{split}.{recipe.data.target}"))
    sentence = sample if len(sample) <= LONGEST_SAMPLE else "A sentence."
    serve = f"econmt serve -m {model}"
    if not all(map(importlib.util.find_spec, EXTRAS["serve"][0])):
        serve += "   # after: pip install 'econmt[serve]'"
    source, reference = (_quoted(store / f"{split}.{side}.txt") for side in ("source", "target"))
    return [
        *([] if factors else [f"echo {shlex.quote(sentence)} | econmt translate -m {model}"]),
        f"econmt translate -m {model} -i {source}{factors} -o {translated}",
        f"econmt evaluate -r {reference} -i {translated}",
        *([] if factors else [serve]),
    ]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
