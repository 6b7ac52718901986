"""``econmt train``: train a model from a recipe, or go on where it stopped."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from econmt.cli.consoles import table_console
from econmt.cli.options import DataDirOption, OverridesArgument, RecipeArgument, RecipeDeviceOption
from econmt.data.batches import bucket_rule, training_batches
from econmt.data.buckets import assign_buckets
from econmt.data.corpus import search_path
from econmt.data.store import PreparedData, prepare, store_folder
from econmt.engine.devices import resolve_device
from econmt.engine.precision import precision_of_run
from econmt.memory.plan.planner import plan_table
from econmt.memory.report.tables import table as ledger_table
from econmt.recipe import Recipe, find_recipe, load_recipe
from econmt.tasks.translation import TranslationTask
from econmt.training.budget import first_plan
from econmt.training.folder import ModelFolder
from econmt.training.interrupts import Interrupted
from econmt.training.results import Results
from econmt.training.run import run_recipe
from econmt.training.state import seed_everything


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    data_dir: DataDirOption = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Model folder, instead of the recipe's.")
    ] = None,
    device: RecipeDeviceOption = None,
    overwrite_output: Annotated[
        bool,
        typer.Option("--overwrite-output", "--fresh", help="Start anew; the folder's run is lost."),
    ] = False,
    resume_with_changes: Annotated[
        bool, typer.Option("--resume-with-changes", help="Go on although the recipe has changed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prepare the text, say what would be trained, and leave.")
    ] = False,
) -> None:
    """Train a model from a recipe. The same command again goes on where training stopped, however it stopped.

    \b
    Example:
      econmt train multi30k training.batch.size=128 --output runs/m1
    """
    changes = list(overrides or [])
    changes += [f"output={output}"] if output is not None else []
    changes += [f"training.device={device}"] if device is not None else []
    loaded = load_recipe(recipe, changes)
    search = search_path(find_recipe(recipe).parent, data_dir)
    talk = Console(stderr=True, highlight=False)
    results = table_console()
    if dry_run:
        ModelFolder(loaded.output).create()
        prepared = prepare(loaded, store_folder(loaded), search, show_progress=talk.is_terminal)
        _describe(loaded, prepared, results)
        return
    try:
        outcome = run_recipe(
            loaded,
            search,
            console=talk,
            overwrite_output=overwrite_output,
            resume_with_changes=resume_with_changes,
        )
    except Interrupted as interrupted:
        talk.print(f"econmt: {interrupted}", soft_wrap=True, markup=False)
        raise typer.Exit(interrupted.exit_code) from interrupted
    if outcome.results is None:
        result = outcome.training
        print(
            f"{loaded.output}: finished at update {result.update} ({result.reason}), best checkpoint "
            f"{result.best_update}; nothing to do"
        )
        return
    _print_results(outcome.results, results)


def _print_results(found: Results, console: Console) -> None:
    """The results of a run, on standard output."""
    for number, sample in enumerate(found.samples, 1):
        print(f"source {number}:      {sample.source}")
        print(f"translation {number}: {sample.translation}")
        print(f"reference {number}:   {sample.reference}")
    console.print(ledger_table(found.ledger))
    for picture in found.pictures:
        print(f"picture: {picture}")
    if not math.isnan(found.bleu):
        print(f"{found.corpus} BLEU {found.bleu:.2f} of checkpoint {found.best_update} ({found.signature})")


def _describe(recipe: Recipe, prepared: PreparedData, console: Console) -> None:
    """What would be trained: the model by layer, the vocabulary, the batches by shape."""
    seed_everything(recipe.training.seed)
    model = TranslationTask.of(recipe, prepared).build_model()
    print(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    table = Table(title=f"parameters: {sum(sizes.values()):,}")
    table.add_column("layer")
    table.add_column("parameters", justify="right")
    layers = model.parameter_layers()
    for layer in dict.fromkeys(layers.values()):
        table.add_row(layer, f"{sum(sizes[name] for name, its in layers.items() if its == layer):,}")
    console.print(table)
    source, target = prepared.vocabularies
    shared = " (one for both)" if source is target else ""
    print(f"vocabulary: {source.size:,} source, {target.size:,} target{shared}")
    training = recipe.training
    batches = training_batches(recipe, prepared)
    print(f"{len(prepared.train):,} pairs in {batches.batches_per_epoch:,} batches an epoch")
    buckets = Table(title="buckets")
    for column in ("source positions", "target positions", "pairs"):
        buckets.add_column(column, justify="right")
    rule = bucket_rule(recipe, target.size)
    found = assign_buckets(prepared.train.source_lengths, prepared.train.target_lengths, rule)
    for (source_width, target_width), pairs in zip(found.shapes.tolist(), found.counts.tolist(), strict=True):
        buckets.add_row(str(source_width), str(target_width), f"{pairs:,}")
    console.print(buckets)
    device = resolve_device(training.device)
    plan = first_plan(recipe, prepared, device, precision_of_run(recipe, device).dtype)
    if plan is not None:
        console.print(plan_table(plan))
