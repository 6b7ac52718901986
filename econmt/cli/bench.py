"""``econmt bench``: times candidates of auto, and training steps on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from econmt.api.commands import warn_of_slowness
from econmt.bench import selection, training
from econmt.bench.rows import Row, Say, append_csv, circumstances, csv_text, draw, read_csv, table
from econmt.cli.workload import find_workload
from econmt.config import limits
from econmt.config.recipe import load_recipe
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.engine.devices import reproducible, resolve_device
from econmt.engine.precision import precision_of_run
from econmt.options.option_groups import argument, option, with_option_groups
from econmt.options.shared_options import (
    AllCoresOption,
    BatchChoice,
    DeviceOption,
    RecipeChoice,
    bytes_of,
    check_picture,
    check_writable,
)
from econmt.training.choice import expected_updates
from econmt_memory.report.tables import print_table, table_console

app = typer.Typer(
    help="Measure on this machine: what auto chooses, training steps. Prints a table on a terminal, CSV into a pipe.",
    epilog="\b\nExample:\n  econmt bench select multi30k\n  econmt bench training multi30k --csv training.csv",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Seconds = Annotated[float, Field(ge=0.0, le=limits.SECONDS)]


@dataclass
class BenchSession:
    """Device and threads of a benchmark, and the files that it writes; InputError names one that cannot be used."""

    device_name: DeviceOption = "auto"
    threads: AllCoresOption = None
    csv: Path | None = option(None, help="CSV file to append the rows to, with machine, versions and date.")
    plot: Path | None = option(None, help="Picture to draw the rows in.")

    def __post_init__(self) -> None:
        check_writable(self.csv)
        check_picture(self.plot)
        self.device = resolve_device(self.device_name)
        self.interrupted = False
        self.conditions: Row = {}

    @contextmanager
    def measuring(self) -> Iterator[Say]:
        """Context for measuring with reproducible settings; yields a function that shows the progress."""
        with reproducible(self.device, self.threads), status_line() as say:
            if self.device.type == "cpu":
                warn_of_slowness()
            yield say

    def kept(self, rows: Iterable[Row]) -> list[Row]:
        """Collects rows, and appends each to the CSV file; after Ctrl-C returns those measured so far."""
        self.conditions = fixed = circumstances(self.device)
        if self.csv is not None:
            read_csv(self.csv)
        kept: list[Row] = []
        try:
            for row in rows:
                kept.append(row)
                if self.csv is not None:
                    append_csv(self.csv, [row], fixed)
        except KeyboardInterrupt:
            if not kept:
                raise
            print("econmt bench: interrupted; the results so far follow", file=sys.stderr)
            self.interrupted = True
        return kept

    def results(self, rows: Sequence[Row], columns: Iterable[str], title: str) -> None:
        """Prints rows on standard output, on a terminal some columns as a table, else whole as CSV.

        Then raises KeyboardInterrupt if :meth:`kept` was interrupted.
        """
        if sys.stdout.isatty():
            print_table(table_console(), table(rows, columns, title))
        elif rows:
            sys.stdout.write(csv_text([{**row, **self.conditions} for row in rows]))
        if self.interrupted:
            raise KeyboardInterrupt

    def draw(self, rows: Sequence[Row], *, label: Sequence[str], value: str, title: str) -> None:
        """Draws rows by :func:`econmt.bench.rows.draw`, if a picture is given."""
        if self.plot is not None:
            draw(rows, self.plot, label=label, value=value, title=title)


@app.command("select")
@with_option_groups
def select_command(
    *,
    recipe: RecipeChoice,
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
    settings = recipe.load()
    with session.measuring() as say:
        say(f"measuring the ops of {recipe.recipe}")
        workload = find_workload(recipe.recipe, settings, batch, None)
        measured, chosen = selection.choose(
            workload.task,
            workload.shape,
            session.device,
            precision_of_run(settings, session.device),
            seconds=600.0 if compiled else seconds,
            compiled=compiled,
            byte_limit=most,
            updates=expected_updates(settings.training, 0),
        )
        rows = session.kept(selection.rows_of(measured.measurements.values(), most))
        columns = ("problem", "calls", "candidate", "milliseconds", "highest decile")
        results = ("bytes kept", "first call, s", "chosen", "regret")
        session.results(rows, (*columns, *results), f"{settings.name}: what auto chooses")
        parts = ", ".join(f"{key} {value}" for key, value in chosen._asdict().items())
        notice(f"a run uses: {parts} (measured in {measured.seconds:.1f} s)")
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
