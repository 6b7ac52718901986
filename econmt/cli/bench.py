"""``econmt bench``: times candidates of auto, and training steps on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

import typer

from econmt.bench import selection, training
from econmt.bench.rows import Row, Say
from econmt.cli.measuring import BenchSession, Seconds
from econmt.cli.workload import find_workload
from econmt.config import limits
from econmt.config.recipe import load_recipe
from econmt.data.files import notice
from econmt.engine.precision import precision_of_run
from econmt.options.option_groups import argument, option, with_option_groups
from econmt.options.shared_options import BatchChoice, OverridesArgument, RecipeChoice, bytes_of
from econmt.training.choice import expected_updates

app = typer.Typer(
    help="Measure on this machine: what auto chooses, training steps. Prints a table on a terminal, CSV into a pipe.",
    epilog="\b\nExample:\n  econmt bench select multi30k\n  econmt bench training multi30k --csv training.csv",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("select")
@with_option_groups
def select_command(
    *,
    recipe: str = argument(..., help="Recipe: a YAML file or a shipped name."),
    overrides: OverridesArgument = None,
    batch: BatchChoice,
    compiled: bool = option(
        False, help="Include compiled candidates, which takes a minute, and remember the time of compiling."
    ),
    byte_limit: str | None = option(
        None, help="Maximum bytes that an op may keep for the backward pass, e.g. 64MiB.", metavar="BYTES"
    ),
    seconds: Seconds = option(2.0, help="Seconds for choosing an implementation."),
    session: BenchSession,
) -> None:
    """Time all candidates for the ops of a recipe. Print what auto chooses and the loss of the others.

    A few positions of the bucket are timed, as a run does. The figures are cached, and runs of the recipe use them.

    \b
    Example:
      econmt bench select multi30k
      econmt bench select iwslt --bucket 50x50 --compiled
    """
    most = bytes_of("--byte-limit", byte_limit)
    settings = RecipeChoice(recipe, overrides).load()
    with session.measuring() as say:
        say(f"measuring the ops of {recipe}")
        workload = find_workload(recipe, settings, batch, None)
        chosen = selection.choose(
            settings,
            workload.task.sizes,
            workload.shape,
            session.device,
            precision_of_run(settings, session.device),
            seconds=600.0 if compiled else seconds,
            compiled=compiled,
            byte_limit=most,
            updates=expected_updates(settings.training, 0),
        )
        rows = selection.rows_of(chosen.measurements, most)
        columns = ("problem", "calls", "candidate", "milliseconds", "highest decile")
        results = ("bytes kept", "first call, s", "chosen", "regret")
        session.results(rows, (*columns, *results), f"{settings.name}: what auto chooses")
        parts = ", ".join(f"{key} {value}" for key, value in chosen.implementations._asdict().items())
        notice(f"a run uses: {parts} (measured in {chosen.seconds:.1f} s)")
        rows = session.kept(rows)
    session.draw(rows, label=("problem", "candidate"), value="regret", title="regret")


@app.command("training")
@with_option_groups
def training_command(
    *,
    recipes: list[str] = argument(..., help="Recipes: YAML files or shipped names."),
    changes: list[str] | None = option(
        None, "--set", help="Key to change in all recipes; may be repeated.", metavar="KEY=VALUE"
    ),
    precisions: list[Literal["auto", "float32", "bfloat16", "float16"]] = option(
        ["auto"], "--precision", help="Precision of matrix products; may be repeated."
    ),
    lengths: list[int] = option(
        [25, 50],
        "--length",
        help="Positions on each side of a pair; may be repeated.",
        min=2,
        max=limits.POSITIONS,
    ),
    seconds: Seconds = option(3.0, help="Seconds for each row of the table."),
    session: BenchSession,
) -> None:
    """Time training steps of recipes on random text without padding. Print tokens per second and memory.

    \b
    Example:
      econmt bench training multi30k --length 16
      econmt bench training iwslt --precision float32 --csv training.csv
      econmt bench training iwslt --length 50 --set ops.decoder=reference
    """
    loaded = {name: load_recipe(name, changes or []) for name in recipes}

    def measured(say: Say) -> Iterator[Row]:
        lines = list(product(loaded, precisions, lengths))
        for number, (name, precision, length) in enumerate(lines, 1):
            say(f"training {number} of {len(lines)}: {name}, {precision}, {length} positions")
            yield training.row_of(name, loaded[name], precision, length, session.device, seconds)

    with session.measuring() as say:
        rows = session.kept(measured(say))
    label = ("recipe", "precision", "batch", "length")
    times = ("target tokens/s", "milliseconds", "highest decile")
    results = ("peak bytes", "feature map bytes", "of them attention", "failure")
    session.results(rows, (*label, *times, *results), "training steps")
    session.draw(rows, label=label, value="target tokens/s", title="training")
