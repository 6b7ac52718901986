"""``econmt bench``: times matrix layouts, candidates of auto, and training steps on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import typer

from econmt.bench import layouts, selection, training
from econmt.bench.rows import Row, Say, append_csv, read_csv
from econmt.cli.measuring import BenchSession, Dtypes, Seconds, dtypes_of
from econmt.cli.workload import find_workload
from econmt.config import limits
from econmt.config.recipe import load_recipe
from econmt.data.files import notice
from econmt.engine.precision import precision_of_run
from econmt.errors import InputError
from econmt.options.option_groups import argument, option, with_option_groups
from econmt.options.shared_options import BatchChoice, OverridesArgument, RecipeChoice, bytes_of, refuse_idle
from econmt.training.choice import expected_updates

app = typer.Typer(
    help="Measure on this machine: layouts of matrix products, what auto chooses, training steps. Prints a table on a "
    "terminal, and CSV into a pipe.",
    epilog="\b\nExample:\n  econmt bench layout --paper\n  econmt bench training multi30k --csv training.csv",
    no_args_is_help=True,
    rich_markup_mode=None,
)
PROJECT_BENCHMARKS = ("lstm", "scan", "memory-task", "language-model", "parallel")
"""Benchmarks of the project itself, which are available in a checkout of the source only."""


@app.command("layout")
@with_option_groups
def layout_command(
    context: typer.Context,
    *,
    recurrent: bool = option(
        False, help="Time loops of products, as in an LSTM, instead of single products."
    ),
    paper: bool = option(False, help="Time only the published shape: X 64 x 512, W 2048 x 512."),
    dtypes: Dtypes = ["float32", "bfloat16"],  # noqa: B006  typer copies it
    graph: bool = option(
        False, help="On a GPU: time calls in CUDA graphs, without the time of launching them."
    ),
    seconds: Seconds = option(0.5, help="Seconds for timing the candidates of one product."),
    session: BenchSession,
) -> None:
    """Time matrix products in each memory layout and library. Both forward and backward products are timed.

    \b
    Example:
      econmt bench layout --paper
      econmt bench layout --csv layout.csv --plot layout.png
      econmt bench layout --recurrent --dtype float32 --threads 1
      econmt bench layout --device cuda --graph
    """
    if recurrent:
        refuse_idle(context, "is for single products; leave out that or --recurrent", "paper")
    types = dtypes_of(dtypes)
    if graph and session.device.type != "cuda":
        raise InputError("--graph needs a GPU; give --device cuda, or leave it out")
    with session.measuring() as say:
        timer = layouts.LayoutTimer(types, session.device, seconds, say, graph=graph)
        if recurrent:
            rows = session.kept(timer.loops(layouts.RECURRENT))
        else:
            rows = session.kept(timer.products([layouts.PAPER] if paper else layouts.SHAPES))
    columns = ("dtype", "rows", "inputs", "outputs", "what", "library", "layout")
    figures = ("milliseconds", "highest decile", "GFLOP/s")
    session.results(rows, (*columns, *figures), "layouts: X (rows, inputs), W (outputs, inputs)")
    label = ("dtype", "rows", "inputs", "what", "library", "layout")
    session.draw(rows, label=label, value="GFLOP/s", title="layouts")


@dataclass(frozen=True)
class GridOptions:
    """Options for measuring a grid of shapes instead of a recipe."""

    grid: bool = option(
        False,
        help="Measure a grid of shapes: choose, measure all candidates again, and report the loss of the choice.",
    )
    part: str = option(
        "1/1",
        help="With --grid: measure only the shapes I, I + N, ..., so that N processes can share the grid.",
        metavar="I/N",
    )
    limit: Seconds = option(75.0, help="With --grid: seconds after which no further shape is begun.")
    summary: bool = option(
        False, help="Join and summarize CSV files of --grid, which are given as arguments."
    )


@app.command("select")
@with_option_groups
def select_command(
    context: typer.Context,
    *,
    recipe: str | None = argument(None, help="Recipe: a YAML file or a shipped name; none with --grid."),
    overrides: OverridesArgument = None,
    grid: GridOptions,
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
    With --grid and --csv, shapes that the file contains are skipped, so that the same command resumes.

    \b
    Example:
      econmt bench select multi30k
      econmt bench select iwslt --bucket 50x50 --compiled
      econmt bench select --grid --csv choices.csv
      econmt bench select --grid --part 3/8 --threads 2 --limit 3600 --csv 3.csv
      econmt bench select --summary [1-8].csv
    """
    if grid.grid + (recipe is not None) != 1 or (grid.summary and recipe is None):
        raise InputError("econmt bench select: give a recipe, --grid, or --summary and CSV files")
    if not grid.grid:
        refuse_idle(context, "is for --grid; give that, or leave it out", "part", "limit")
    if recipe is None or grid.summary:
        why = f"is for a recipe; leave it out with {'--summary' if grid.summary else '--grid'}"
        refuse_idle(context, why, "bucket", "batch", "compiled", "byte_limit")
    if grid.summary:
        refuse_idle(context, "is for measuring; leave it out with --summary", "seconds", "plot")
        _sum_up([Path(name) for name in (recipe or "", *(overrides or []))], session)
        return
    with session.measuring() as say:
        if recipe is None:
            rows = _grid(session, grid, seconds, say)
            label: tuple[str, ...] = selection.GridEntry._fields
        else:
            most = bytes_of("--byte-limit", byte_limit)
            say(f"measuring the ops of {recipe}")
            rows = _select(session, RecipeChoice(recipe, overrides), batch, seconds, compiled, most)
            label = ("problem", "candidate")
    session.draw(rows, label=label, value="regret", title="regret")


def _select(
    session: BenchSession,
    choice: RecipeChoice,
    batch: BatchChoice,
    seconds: float,
    compiled: bool,
    byte_limit: int | None,
) -> list[Row]:
    """Measures a recipe's ops and prints them."""
    recipe = choice.load()
    workload = find_workload(choice.recipe, recipe, batch, None)
    chosen = selection.choose(
        recipe,
        workload.task.sizes,
        workload.shape,
        session.device,
        precision_of_run(recipe, session.device),
        seconds=600.0 if compiled else seconds,
        compiled=compiled,
        byte_limit=byte_limit,
        updates=expected_updates(recipe.training, 0),
    )
    rows = selection.rows_of(chosen.measurements, byte_limit)
    columns = ("problem", "calls", "candidate", "milliseconds", "highest decile")
    results = ("bytes kept", "first call, s", "chosen", "regret")
    session.results(rows, (*columns, *results), f"{recipe.name}: what auto chooses")
    parts = ", ".join(f"{key} {value}" for key, value in chosen.implementations._asdict().items())
    notice(f"a run uses: {parts} (measured in {chosen.seconds:.1f} s)")
    return session.kept(rows)


def _grid(session: BenchSession, options: GridOptions, seconds: float, say: Say) -> list[Row]:
    """Measures the shapes of the grid that the file lacks; prints them, and a summary of all shapes."""
    before = session.rows_before({"bench": "select-grid"})
    done = {tuple(row[name] for name in selection.GridEntry._fields) for row in before}
    entries = selection.part_of(selection.grid(), options.part)
    missing = [entry for entry in entries if tuple(map(str, entry)) not in done]
    rows = session.kept(selection.regrets(missing, session.device, seconds, options.limit, say))
    columns = ("choice", "milliseconds", "best", "best milliseconds", "rule milliseconds", "regret")
    session.results(rows, (*selection.GridEntry._fields, *columns), "what auto chooses, measured again")
    if (before or rows) and sys.stdout.isatty():
        session.print(selection.summary([*before, *rows]), selection.SUMMARY, "loss of what auto chooses")
    if len(rows) < len(missing):
        resumes = "" if session.csv is None else "; the same command resumes"
        notice(f"{len(missing) - len(rows)} shapes are left{resumes}")
    return rows


def _sum_up(files: Sequence[Path], session: BenchSession) -> None:
    """Prints a summary of the grid's rows in files; writes them to the session's file if it has one."""
    rows: list[dict[str, str]] = []
    for path in files:
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        rows += read_csv(path)[1]
    shapes = selection.joined(rows)
    if not shapes:
        raise InputError(f"{files[0]}: no rows of econmt bench select --grid")
    if session.csv is not None:
        append_csv(session.csv, [dict(row) for row in shapes], {})
    machines = sorted({f"{row['gpu'] or row['processor']}, {row['threads']} threads" for row in shapes})
    machine: Row = {"machine": "; ".join(machines)}
    session.results(selection.summary(shapes), selection.SUMMARY, f"{machine['machine']}: regret", machine)


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


def _elsewhere(context: typer.Context) -> None:
    name = context.info_name
    raise InputError(
        f"econmt bench {name} measures the project itself and is not installed; in a checkout of econmt run "
        f"python -m scripts.bench {name}"
    )


for _name in PROJECT_BENCHMARKS:
    app.command(
        _name, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
    )(_elsewhere)
