"""``econmt bench``: what layouts, choices and training steps take on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer

from econmt.bench import choice, layout, low_rank, lstm, training
from econmt.bench.sheet import Row, Say, append_csv, read_csv
from econmt.cli.sheets import Place, dtype, measures, print_rows
from econmt.cli.workload import find_workload
from econmt.engine.precision import precision_of_run
from econmt.errors import InputError
from econmt.recipe import load_recipe
from econmt.training.choice import Shape, expected_updates
from econmt.typed_yaml import parse_size

app = typer.Typer(
    help="Measure on this machine: layouts of matrix products, what auto chooses, training steps, LSTM schedules.",
    epilog="\b\nExample:\n  econmt bench layout --paper\n  econmt bench lstm --ablation --csv lstm.csv --plot lstm.png",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Types = Annotated[list[str], typer.Option("--dtype", help="float32, bfloat16; may be repeated.")]


@app.command("layout")
@measures
def layout_command(
    place: Place,
    recurrent: Annotated[
        bool, typer.Option("--recurrent", help="Loops of products, as in an LSTM, instead of single ones.")
    ] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="The published shape alone: X 64 x 512, W 2048 x 512.")
    ] = False,
    dtypes: _Types = ["float32", "bfloat16"],  # noqa: B006  typer copies it
    seconds: Annotated[float, typer.Option(min=0.0, help="For the candidates of one product.")] = 0.5,
) -> None:
    """Time matrix products in each memory layout and library, forward and backward.

    \b
    Example:
      econmt bench layout --paper
      econmt bench layout --csv layout.csv --plot layout.png
      econmt bench layout --recurrent --dtype float32 --threads 1
    """
    types = [dtype(name) for name in dtypes]
    setting = layout.Setting(place.device, seconds)
    with place.measuring() as say:
        if recurrent:
            found = layout.recurrence(layout.RECURRENT, types, setting, say)
        else:
            found = layout.products([layout.PAPER] if paper else layout.SHAPES, types, setting, say)
        rows = place.kept(found)
    columns = (
        "dtype",
        "rows",
        "inputs",
        "outputs",
        "what",
        "library",
        "layout",
        "milliseconds",
        "highest decile",
    )
    print_rows(rows, (*columns, "GFLOP/s"), "layouts: X (rows, inputs), W (outputs, inputs)")
    label = ("dtype", "rows", "inputs", "what", "library", "layout")
    place.draw(rows, label=label, value="GFLOP/s", title="layouts")


@app.command("select")
@measures
def select_command(
    place: Place,
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="Recipe: a YAML file or a shipped name; none with --grid.", show_default=False),
    ] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.", show_default=False),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="A grid of shapes: choose, measure all again, tell what is lost.")
    ] = False,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="With --grid: the shapes I, I + N, ..., for N processes.")
    ] = "1/1",
    summary: Annotated[
        bool, typer.Option("--summary", help="The arguments are CSV files of --grid: join and sum them up.")
    ] = False,
    bucket: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SxT",
            help="Source x target positions; else the recipe's worst. A few of them are timed, as a run does.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Sentence pairs, instead of the recipe's.", show_default=False),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile too, which takes a minute, and remember how long.")
    ] = False,
    byte_limit: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="BYTES", help="What an op may keep, e.g. 64MiB.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="For a choice.")] = 2.0,
    limit: Annotated[float, typer.Option(min=0.0, help="Seconds after which --grid begins no shape.")] = 75.0,
) -> None:
    """Print every candidate's time for the ops of a recipe, what auto chooses and what the others would lose.

    The figures are remembered, and the recipe's runs use them. With --grid and --csv, shapes that the file has already
    are left out, so that the same command goes on where it stopped.

    \b
    Example:
      econmt bench select multi30k
      econmt bench select iwslt --bucket 50x50 --compiled
      econmt bench select --grid --csv choices.csv
      econmt bench select --grid --part 3/8 --threads 2 --limit 3600 --csv part3.csv
      econmt bench select --summary part*.csv
    """
    if [grid, summary, recipe is not None and not summary].count(True) != 1 or (summary and recipe is None):
        raise InputError("econmt bench select: give a recipe, --grid, or --summary and CSV files")
    if summary:
        print(_sum_up([Path(name) for name in (recipe or "", *(overrides or []))], place.csv))
        return
    with place.measuring() as say:
        if recipe is None:
            rows = _grid(place, seconds, limit, part, say)
            label: tuple[str, ...] = choice.Entry._fields
        else:
            changes = overrides or []
            rows = _select(recipe, changes, bucket, batch, place.device, seconds, compiled, byte_limit)
            place.kept(rows)
            label = ("problem", "candidate")
    place.draw(rows, label=label, value="regret", title="regret")


def _select(
    name: str,
    changes: Sequence[str],
    bucket: str | None,
    batch: int | None,
    where: torch.device,
    seconds: float,
    compiled: bool,
    byte_limit: str | None,
) -> list[Row]:
    """Measures a recipe's ops and prints them."""
    recipe = load_recipe(name, changes)
    found = find_workload(name, recipe, bucket, batch, None)
    try:
        most = None if byte_limit is None else parse_size(byte_limit)
    except ValueError as error:
        raise InputError(f"--byte-limit: {error}") from None
    chosen = choice.choose(
        recipe,
        found.task.sizes,
        Shape(*found.shape),
        where,
        precision_of_run(recipe, where),
        seconds=600.0 if compiled else seconds,
        compiled=compiled,
        byte_limit=most,
        updates=expected_updates(recipe.training, 0, 0),
    )
    rows = choice.rows_of(chosen.measurements, most)
    columns = (
        "problem",
        "calls",
        "candidate",
        "milliseconds",
        "highest decile",
        "bytes kept",
        "first call, s",
    )
    print_rows(rows, (*columns, "chosen", "regret"), f"{recipe.name}: what auto chooses")
    parts = ", ".join(f"{key} {value}" for key, value in chosen.implementations._asdict().items())
    print(f"a run uses: {parts} (measured in {chosen.seconds:.1f} s)")
    return rows


def _grid(place: Place, seconds: float, limit: float, part: str, say: Say) -> list[Row]:
    """Measures what is missing of the grid, prints it and the summary of all of it."""
    before = place.rows_before({"bench": "select-grid"})
    done = {tuple(row[name] for name in choice.Entry._fields) for row in before}
    left = [entry for entry in choice.part_of(choice.grid(), part) if tuple(map(str, entry)) not in done]
    rows = place.kept(choice.regrets(left, place.device, seconds, limit, say))
    columns = ("choice", "milliseconds", "best", "best milliseconds", "rule milliseconds", "regret")
    print_rows(rows, (*choice.Entry._fields, *columns), "what auto chooses, measured again")
    everything: list[Mapping[str, str | int | float]] = [*before, *rows]
    if everything:
        print(choice.summary(everything))
    if len(rows) < len(left):
        print(
            f"{len(left) - len(rows)} shapes are left"
            + ("" if place.csv is None else "; the same command goes on")
        )
    return rows


def _sum_up(files: Sequence[Path], csv: Path | None) -> str:
    """The summary of the grid's rows in files, which are joined in another one if it is named."""
    rows: list[dict[str, str]] = []
    for path in files:
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        rows += read_csv(path)[1]
    found = choice.joined(rows)
    if not found:
        raise InputError(f"{files[0]}: no rows of econmt bench select --grid")
    if csv is not None:
        append_csv(csv, [dict(row) for row in found], {})
    machines = sorted({f"{row['gpu'] or row['processor']}, {row['threads']} threads" for row in found})
    return f"{'; '.join(machines)}\n{choice.summary(found)}"


@app.command("training")
@measures
def training_command(
    place: Place,
    recipes: Annotated[
        list[str], typer.Argument(help="Recipes: YAML files or shipped names.", show_default=False)
    ],
    changes: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="KEY=VALUE", help="A key to change in all recipes; may be repeated."),
    ] = None,
    precisions: Annotated[
        list[str], typer.Option("--precision", help="auto, float32 or bfloat16; may be repeated.")
    ] = ["auto"],  # noqa: B006
    lengths: Annotated[
        list[int], typer.Option("--length", min=2, help="Positions on each side; may be repeated.")
    ] = [25, 50],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=0.0, help="For each line of the table.")] = 3.0,
) -> None:
    """Time training steps of recipes on random text of full rows: target tokens a second, peak memory, feature maps.

    \b
    Example:
      econmt bench training multi30k --length 16
      econmt bench training iwslt --length 50 --precision float32 --set ops.decoder=reference --csv training.csv
    """
    loaded = {name: load_recipe(name, changes or []) for name in recipes}

    def measured(say: Say) -> Iterator[Row]:
        for name, recipe in loaded.items():
            for precision in precisions:
                for length in lengths:
                    say(f"training: {name}, {precision}, {length} positions")
                    yield training.row_of(name, recipe, precision, length, place.device, seconds)

    with place.measuring() as say:
        rows = place.kept(measured(say))
    columns = ("recipe", "precision", "batch", "length", "target tokens/s", "milliseconds", "highest decile")
    print_rows(
        rows, (*columns, "peak bytes", "feature map bytes", "of them attention", "failure"), "training steps"
    )
    label = ("recipe", "precision", "batch", "length")
    place.draw(rows, label=label, value="target tokens/s", title="training")


@app.command("lstm")
@measures
def lstm_command(
    place: Place,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Each decision of the schedule; else batches up to the peak.")
    ] = False,
    compile_loop: Annotated[
        bool,
        typer.Option(
            "--compile-loop", help="Also torch.compile of a plain loop: about a second a step to compile."
        ),
    ] = False,
    bidirectional: Annotated[
        bool,
        typer.Option("--bidirectional", help="With --ablation: one layer in both directions instead."),
    ] = False,
    schedules: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--schedule",
            help="With --ablation: only names that contain this; may be repeated.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Of the stack.")] = lstm.PUBLISHED[0],
    steps: Annotated[int, typer.Option(min=1, help="Of a sequence.")] = lstm.PUBLISHED[1],
    hidden: Annotated[int, typer.Option(min=1, help="Units of a layer.")] = lstm.PUBLISHED[2],
    batches: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(
            "--batch",
            min=1,
            help="Sequences: one with --ablation (64), else may be repeated.",
            show_default=False,
        ),
    ] = None,
    dtypes: _Types = ["float32", "bfloat16"],  # noqa: B006
    samples: Annotated[int, typer.Option(min=1, help="Timed calls of each; the quickest counts.")] = 5,
    limit: Annotated[
        float, typer.Option(min=0.0, help="Seconds after which no batch is begun, without --ablation.")
    ] = 600.0,
) -> None:
    """Time a stack of LSTM layers, forward and backward, under different schedules and against torch.nn.LSTM.

    Without --ablation: operations a second against the batch. Batches that the file of --csv has already are left out
    and drawn from there.

    \b
    Example:
      econmt bench lstm --ablation
      econmt bench lstm --ablation --compile-loop --schedule torch. --dtype float32
      econmt bench lstm --ablation --dtype bfloat16 --csv lstm.csv --plot lstm.png
      econmt bench lstm --csv rates.csv --limit 60 --plot rates.png
    """
    if ablation and len(batches or [1]) != 1:
        raise InputError("--batch: give one with --ablation")
    if bidirectional and not ablation:
        raise InputError("--bidirectional: give it with --ablation")
    types, batch = [dtype(name) for name in dtypes], (batches or lstm.PUBLISHED[3:])[0]
    shape = lstm.Shape(2 if bidirectional else layers, steps, hidden, batch)
    before = []
    with place.measuring() as say:
        what = (shape, types, place.device, say)
        if ablation:
            only = schedules or ()
            found = lstm.ablation(
                *what, samples=samples, compile_loop=compile_loop, both_ways=bidirectional, only=only
            )
        else:
            fixed: Row = {"bench": "lstm-rates", "layers": layers, "steps": steps, "hidden": hidden}
            before = place.rows_before(fixed)
            done = {(row["dtype"], int(row["batch"])) for row in before}
            found = lstm.rates(*what, samples=samples, batches=batches, limit=limit, done=done)
        rows = place.kept(found)
    name = "both directions" if bidirectional else f"{layers} layers"
    title = f"LSTM: {name}, {steps} steps, {hidden} units"
    if ablation:
        _show_ablation(place, rows, f"{title}, batch {batch}")
    else:
        _show_rates(place, rows, before, title)


_LSTM_TIMES = ("forward, ms", "forward and backward, ms")


def _show_ablation(place: Place, rows: list[Row], title: str) -> None:
    gains = ("forward, gain", "published gain", "forward and backward, gain")
    columns = ("dtype", "schedule", *_LSTM_TIMES, *gains, "forward and backward, GFLOP/s")
    print_rows(rows, (*columns, "peak bytes", "first call, s"), title)
    place.draw(rows, label=("dtype", "schedule"), value=_LSTM_TIMES[1], title=title)


def _show_rates(place: Place, rows: list[Row], before: list[dict[str, str]], title: str) -> None:
    rate = "forward and backward, GFLOP/s"
    print_rows(rows, ("dtype", "schedule", "batch", *_LSTM_TIMES, rate, "peak GFLOP/s"), title)
    everything: list[Mapping[str, str | int | float]] = [*before, *rows]
    if place.plot is not None and everything:
        lstm.draw_rates(everything, place.plot)


@app.command("low-rank")
@measures
def low_rank_command(
    place: Place,
    hidden: Annotated[int, typer.Option(min=1, help="Units, and width of the inputs.")] = low_rank.PUBLISHED[
        0
    ],
    steps: Annotated[int, typer.Option(min=1, help="Of a sequence.")] = low_rank.PUBLISHED[1],
    batches: Annotated[list[int], typer.Option("--batch", min=1, help="Sequences; may be repeated.")] = [  # noqa: B006
        *low_rank.BATCHES
    ],
    ranks: Annotated[list[int], typer.Option("--rank", min=1, help="May be repeated.")] = [*low_rank.RANKS],  # noqa: B006
    dtypes: _Types = ["float32", "bfloat16"],  # noqa: B006
    seconds: Annotated[float, typer.Option(min=0.01, help="For each batch, type and pass.")] = 3.0,
) -> None:
    """Time an LSTM layer with whole matrices and with thin factors of several ranks, forward and backward.

    \b
    Example:
      econmt bench low-rank
      econmt bench low-rank --batch 16 --dtype float32 --csv low-rank.csv --plot low-rank.png
    """
    types = [dtype(name) for name in dtypes]
    with place.measuring() as say:
        found = low_rank.rows((hidden, steps), batches, ranks, types, place.device, say, seconds=seconds)
        rows = place.kept(found)
    title = f"LSTM of {hidden} units, {steps} steps; gain over the fastest whole layer"
    columns = ("dtype", "batch", "layer", "parameters", *(f"{what}, ms" for what in low_rank.PASSES))
    print_rows(rows, (*columns, *(f"{what}, gain" for what in low_rank.PASSES), "difference"), title)
    place.draw(rows, label=("dtype", "batch", "layer"), value="forward and backward, ms", title=title)
