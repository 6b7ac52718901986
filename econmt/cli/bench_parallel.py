"""``econmt bench parallel``: what several ranks gain, measured here and predicted for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated, get_args

import typer

from econmt import limits
from econmt.bench import parallel_hardware, parallel_simulation
from econmt.bench.parallel_lengths import (
    PENN_TREEBANK,
    Buckets,
    batches_of_text,
    counts_of_figures,
    counts_of_texts,
)
from econmt.bench.rows import Row
from econmt.bench.training import vocabulary_sizes
from econmt.cli.measuring import CsvOption, Place, PlotOption
from econmt.cli.options import OverridesArgument, refuse_idle
from econmt.data.batches import rows_of_batch
from econmt.data.tables import WIDTH
from econmt.errors import InputError
from econmt.parallel.cost_layers import Batch
from econmt.parallel.cost_model import KINDS, Kind
from econmt.parallel.cost_network import Machine
from econmt.recipe import LanguageModelSection, Recipe, load_recipe

MOST_RANKS = 65_536
FULL_LENGTH = 50


def numbers_of(option: str, text: str, most: int) -> list[int]:
    """Whole numbers from 1 in "1,2,4".

    Raises:
        InputError: the text is something else.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= most for part in parts):
        raise InputError(f"{option} '{text}': give numbers from 1 to {most:,} with commas between, as 1,2,4")
    return sorted({int(part) for part in parts})


def kinds_of(text: str) -> list[Kind]:
    """Divisions in "data,pipeline,both".

    Raises:
        InputError: a name is of none.
    """
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise InputError(f"--division '{text}': give some of {', '.join(KINDS)} with commas between")
    return [kind for kind in KINDS if kind in names]


def parallel_command(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Recipe: a YAML file or a shipped name.", show_default="the seed's, for its hardware"
        ),
    ] = None,
    overrides: OverridesArgument = None,
    hardware: Annotated[
        str, typer.Option(help="Published figures of which machine: seed (four GTX 750) or h200.")
    ] = "seed",
    ranks: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Predict for so many.", show_default="1 to 1,024")
    ] = None,
    division: Annotated[
        str, typer.Option(metavar="NAME,...", help="data, pipeline (of layers), both.")
    ] = ",".join(KINDS),
    batch: Annotated[
        str, typer.Option(help="fixed: the recipe's, shared out; grown: as many times its rows as ranks.")
    ] = "fixed",
    length: Annotated[
        int | None,
        typer.Option(
            min=2, max=limits.POSITIONS, help="Positions of a row, all full.", show_default="50, or bptt"
        ),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Sentences whose lengths count instead; source, then target."),
    ] = None,
    within_host: Annotated[
        str | None,
        typer.Option("--within", metavar="LINK", help="Instead of the hardware's link inside a host."),
    ] = None,
    between: Annotated[
        str | None, typer.Option(metavar="LINK", help="Instead of its link between hosts.")
    ] = None,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="Each rank keeps the optimizer's state of its share (ZeRO-1).")
    ] = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Predict what ranks that share updates gain, by latency and bandwidth of links and by times of layers.

    \b
    Example:
      econmt bench parallel
      econmt bench parallel iwslt --hardware h200 --batch grown --plot h200.png
    """
    kinds = kinds_of(division)
    if batch not in ("fixed", "grown"):
        raise InputError(f"--batch '{batch}': give fixed or grown")
    if hardware not in parallel_hardware.HARDWARE:
        raise InputError(f"--hardware '{hardware}': give one of {', '.join(parallel_hardware.HARDWARE)}")
    found = parallel_hardware.HARDWARE[hardware]
    machine = _with_links(found.machine, within_host, between)
    of_seed = recipe is None
    if recipe is None:
        if hardware != "seed":
            raise InputError(f"--hardware {hardware}: give a recipe, e.g. iwslt")
        refuse_idle(context, "is for a recipe; give one, or leave it out", "length")
        chosen = parallel_simulation.seed_recipe()
    else:
        chosen = load_recipe(recipe, overrides or [])
    if texts:
        refuse_idle(context, "is of full rows; leave out that or --text", "length")
    place = Place("cpu", None, csv, plot)
    sizes = vocabulary_sizes(chosen)
    batches = _batches(chosen, sizes[-1], texts or [], length, of_seed)
    longest = max(each.source for each in next(iter(batches.values())))
    value_bytes = min(found.device.flops)
    profile = parallel_hardware.paper_profile(chosen, sizes, found.device, value_bytes, longest)
    counts = numbers_of("--ranks", ranks, MOST_RANKS) if ranks else _ranks_of(machine, of_seed)
    rows = place.kept(
        parallel_simulation.rows(
            profile, machine, batches, counts, kinds, grown=batch == "grown", sharded=sharded
        )
    )
    _print(place, rows, f"{chosen.name} on {machine.name}, batch {batch}: predicted")
    if of_seed and {1, 4} <= set(counts) and {"data", "pipeline"} <= set(kinds) and batch == "fixed":
        _say(parallel_simulation.seed_verdict(rows))
    if plot is not None:
        parallel_simulation.draw(rows, plot, f"{chosen.name} on {machine.name}, predicted")


def _with_links(machine: Machine, within_host: str | None, between: str | None) -> Machine:
    links = parallel_hardware.LINKS
    for option, name in (("--within", within_host), ("--between", between)):
        if name is not None and name not in links:
            raise InputError(f"{option} '{name}': give one of {', '.join(links)}")
    return machine._replace(
        within=machine.within if within_host is None else links[within_host],
        between=machine.between if between is None else links[between],
    )


def _ranks_of(machine: Machine, of_seed: bool) -> Sequence[int]:
    """What is looked at if nobody says: the seed's hardware is one host."""
    return [count for count in parallel_simulation.RANKS if not of_seed or count <= machine.ranks_per_host]


def _batches(
    recipe: Recipe, words: int, texts: list[Path], length: int | None, of_seed: bool
) -> Mapping[str, Sequence[Batch]]:
    """The shapes of updates: of a text with derived buckets and without, or of full rows."""
    if of_seed or texts:
        counts = counts_of_texts(texts, recipe) if texts else counts_of_figures(PENN_TREEBANK)
        return {buckets: batches_of_text(recipe, counts, words, buckets) for buckets in get_args(Buckets)}
    if isinstance(recipe.model, LanguageModelSection):
        target = length or recipe.training.bptt
        rows, source = recipe.training.batch.size, 0
    else:
        target = source = length or FULL_LENGTH
        rows = rows_of_batch(recipe.training.batch, target)
    return {"full rows": [Batch(rows, source, target, rows * target)]}


def _print(place: Place, rows: Sequence[Row], title: str) -> None:
    columns = (
        "buckets",
        "ranks",
        "division",
        "chunks",
        "tokens/s",
        "scaling",
        "exchange %",
        "idle %",
        "MB sent",
        "MB held",
    )
    place.print(rows, columns, title)
    for line in parallel_simulation.fastest(rows):
        _say(line)


def _say(line: str) -> None:
    print("\n".join(wrap(line, WIDTH, subsequent_indent="  ")))
