"""``econmt bench parallel``: what several processes gain, measured here and predicted for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated, NamedTuple, get_args

import torch
import typer

from econmt.bench import parallel_calibration, parallel_hardware, parallel_measure, parallel_simulation
from econmt.bench.parallel_calibration import Calibration, Setting
from econmt.bench.parallel_lengths import (
    PENN_TREEBANK,
    Buckets,
    batches_of_text,
    counts_of_figures,
    counts_of_texts,
)
from econmt.bench.rows import Row, Say
from econmt.bench.training import vocabulary_sizes
from econmt.cli.measuring import CsvOption, Place, PlotOption
from econmt.cli.options import DeviceOption, OverridesArgument, check_writable, refuse_idle, within
from econmt.config import limits
from econmt.config.recipe import LanguageModelSection, Recipe, load_recipe
from econmt.data.batching.batches import rows_of_batch
from econmt.data.tables import WIDTH
from econmt.engine.precision import precision_of_run
from econmt.errors import InputError
from econmt.parallel.cost_layers import Batch, Profile
from econmt.parallel.cost_model import KINDS, Kind
from econmt.parallel.cost_network import Machine

MOST_RANKS = 65_536
FULL_LENGTH = 50
ALL_KINDS = ",".join(KINDS)

RecipeOption = Annotated[
    str | None,
    typer.Argument(help="Recipe: a YAML file or a shipped name.", show_default="the seed's, with --simulate"),
]
SimulateOption = Annotated[
    bool, typer.Option("--simulate", help="Predict, from links and times of layers, up to 1,024 ranks.")
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        help="With --simulate: here, or by published figures seed (four GTX 750) or h200.",
        show_default="here; without a recipe seed",
    ),
]
ProcessesOption = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Measure with so many.", show_default="1,2; none with --simulate"),
]
RanksOption = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="With --simulate: predict for so many.", show_default="1 to 1,024"),
]
DivisionOption = Annotated[str, typer.Option(metavar="NAME,...", help="data, pipeline (of layers), both.")]
BatchOption = Annotated[
    str, typer.Option(help="fixed: the recipe's, shared out; grown: as many times its rows as ranks.")
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        min=2, max=limits.POSITIONS, help="Positions of a row, all full.", show_default="50, or bptt"
    ),
]
TextOption = Annotated[
    list[Path] | None,
    typer.Option("--text", help="With --simulate: sentences whose lengths count; source, then target."),
]
WithinOption = Annotated[
    str | None, typer.Option("--within", metavar="LINK", help="Instead of the hardware's link inside a host.")
]
BetweenOption = Annotated[str | None, typer.Option(metavar="LINK", help="Instead of its link between hosts.")]
ShardedOption = Annotated[
    bool, typer.Option("--sharded", help="Each rank keeps the optimizer's state of its share (ZeRO-1).")
]
MicroOption = Annotated[
    bool, typer.Option("--micro-batches", help="Cut rows too, as pipelines of other toolkits do.")
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(help="Times of layers and links here: read from this JSON, or measured and written."),
]
SecondsOption = Annotated[
    float, typer.Option(callback=within(0.0, limits.SECONDS), help="For each way, twice; for each profile.")
]
LimitOption = Annotated[
    float, typer.Option(callback=within(1.0, limits.SECONDS), help="Seconds after which a way is given up.")
]
ThreadsOption = Annotated[int, typer.Option(min=1, max=limits.THREADS, help="CPU threads of each process.")]


class _Asked(NamedTuple):
    """What of the options a prediction needs, for whatever hardware."""

    kinds: list[Kind]
    grown: bool
    ranks: str | None
    sharded: bool
    micro_batches: bool
    plot: Path | None


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
    recipe: RecipeOption = None,
    overrides: OverridesArgument = None,
    simulate: SimulateOption = False,
    hardware: HardwareOption = None,
    processes: ProcessesOption = None,
    ranks: RanksOption = None,
    division: DivisionOption = ALL_KINDS,
    batch: BatchOption = "fixed",
    length: LengthOption = None,
    texts: TextOption = None,
    within_host: WithinOption = None,
    between: BetweenOption = None,
    sharded: ShardedOption = False,
    micro_batches: MicroOption = False,
    profile: ProfileOption = None,
    seconds: SecondsOption = 5.0,
    limit: LimitOption = 180.0,
    device: DeviceOption = "auto",
    threads: ThreadsOption = 1,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Time updates that several processes share, or predict them, by latency and bandwidth, for up to 1,024 ranks.

    With --simulate and --processes: what is predicted stands beside what is measured.

    \b
    Example:
      econmt bench parallel iwslt --processes 1,2 --batch grown
      econmt bench parallel gnmt --processes 1,2,4 --simulate --csv gnmt.csv --plot gnmt.png
      econmt bench parallel iwslt --simulate --hardware h200
      econmt bench parallel --simulate
    """
    asked = _Asked(kinds_of(division), batch == "grown", ranks, sharded, micro_batches, plot)
    if batch not in ("fixed", "grown"):
        raise InputError(f"--batch '{batch}': give fixed or grown")
    if not simulate:
        why = "is for --simulate; give that, or leave it out"
        refuse_idle(context, why, "hardware", "ranks", "texts", "within_host", "between", "profile")
        refuse_idle(context, why, "sharded", "micro_batches")
    elif ranks is not None:
        numbers_of("--ranks", ranks, MOST_RANKS)
    if recipe is None and not (simulate and hardware in (None, "seed")):
        raise InputError(
            "econmt bench parallel: give a recipe, as iwslt, or --simulate for the seed's hardware"
        )
    for option, name in (("--within", within_host), ("--between", between)):
        if name is not None and name not in parallel_hardware.LINKS:
            raise InputError(f"{option} '{name}': give one of {', '.join(parallel_hardware.LINKS)}")
    check_writable(profile)
    chosen = parallel_simulation.seed_recipe() if recipe is None else load_recipe(recipe, overrides or [])
    of_seed = recipe is None
    where = hardware or ("seed" if of_seed else "here")
    if where != "here":
        if where not in parallel_hardware.HARDWARE:
            raise InputError(
                f"--hardware '{where}': give one of here, {', '.join(parallel_hardware.HARDWARE)}"
            )
        why = "is for this machine; leave it out, or give --hardware here with a recipe"
        refuse_idle(context, why, "processes", "seconds", "limit", "device", "threads", "profile")
        if of_seed or texts:
            refuse_idle(context, "is of full rows; the lengths are those of a text", "length")
        place = Place("cpu", None, csv, plot)
        batches = _batches(chosen, texts or [], length, of_seed)
        _on_paper(place, chosen, where, batches, asked, (within_host, between), of_seed)
        return
    refuse_idle(context, "is measured here; leave it out", "within_host")
    refuse_idle(context, "is for published hardware; leave it out, or give --hardware", "texts")
    place = Place(device, threads, csv, plot)
    counts = numbers_of("--processes", processes or "1,2", limits.THREADS)
    _check_gpus(place.device, max(counts))
    setting = _setting(chosen, place, length, asked.grown, threads, seconds, limit)
    measures = processes is not None or not simulate
    if measures:
        _check_divisible(chosen, counts, asked.kinds)
    found = None
    with place.measuring() as say:
        if simulate:
            found = _calibration(setting, counts, profile, say)
        rows = _measured(place, setting, counts, asked.kinds, found, say) if measures else []
    if found is not None:
        _from_here(place, found, between, asked)
    else:
        place.draw(rows, label=("division",), value="tokens/s", title=_title(setting))


def _check_gpus(device: torch.device, processes: int) -> None:
    """Makes sure that each process can have a GPU, where there are any.

    Raises:
        InputError: there are fewer, or one was named.
    """
    if device.type != "cuda":
        return
    if str(device) != "cuda":
        raise InputError(f"--device {device}: each process has a GPU of its own; give cuda")
    if processes > torch.cuda.device_count():
        raise InputError(
            f"--processes {processes}: this machine has {torch.cuda.device_count()} GPUs; give fewer"
        )


def _check_divisible(recipe: Recipe, counts: Sequence[int], kinds: Sequence[Kind]) -> None:
    """Makes sure that several processes, if any are wanted, can share the updates of a recipe.

    Raises:
        InputError: no division can be measured; a line for each says why.
    """
    wanted = parallel_measure.ways(counts, kinds, parallel_measure.stack_of(recipe))
    if max(counts) > 1 and len(wanted) == 1:
        raise InputError(*parallel_measure.left_out(recipe, counts, kinds))


def _on_paper(
    place: Place,
    recipe: Recipe,
    hardware: str,
    batches: Mapping[str, Sequence[Batch]],
    asked: _Asked,
    links: tuple[str | None, str | None],
    of_seed: bool,
) -> None:
    """A prediction by published figures."""
    found = parallel_hardware.HARDWARE[hardware]
    within_host, between = links
    machine = found.machine
    if within_host is not None:
        machine = machine._replace(within=parallel_hardware.LINKS[within_host])
    if between is not None:
        machine = machine._replace(between=parallel_hardware.LINKS[between])
    longest = max(each.source for each in next(iter(batches.values())))
    sizes = vocabulary_sizes(recipe)
    profile = parallel_hardware.paper_profile(recipe, sizes, found.device, min(found.device.flops), longest)
    most = machine.ranks_per_host if of_seed else MOST_RANKS
    counts = [count for count in _counts(asked) if asked.ranks or count <= most]
    rows = _predict(place, recipe.name, profile, machine, batches, counts, asked)
    whole = {1, 4} <= set(counts) and {"data", "pipeline"} <= set(asked.kinds) and not asked.grown
    if of_seed and whole:
        _say(parallel_simulation.seed_verdict(rows))


def _from_here(place: Place, found: Calibration, between: str | None, asked: _Asked) -> None:
    """A prediction for more machines like this one."""
    whole = Batch(found.batch, found.length * (found.sides - 1), found.length, found.batch * found.length)
    batches = {"full rows": [whole]}
    _predict(place, found.recipe, found.profile, found.machine(between), batches, _counts(asked), asked)


def _predict(
    place: Place,
    name: str,
    profile: Profile,
    machine: Machine,
    batches: Mapping[str, Sequence[Batch]],
    counts: Sequence[int],
    asked: _Asked,
) -> list[Row]:
    rows = place.kept(
        parallel_simulation.rows(
            profile,
            machine,
            batches,
            counts,
            asked.kinds,
            grown=asked.grown,
            sharded=asked.sharded,
            micro_batches=asked.micro_batches,
        )
    )
    title = f"{name} on {machine.name}, batch {'grown' if asked.grown else 'fixed'}: predicted"
    columns = ("buckets", "ranks", "division", "chunks", "tokens/s", "scaling")
    place.print(rows, (*columns, "exchange %", "idle %", "MB sent", "MB held"), title)
    for line in parallel_simulation.fastest(rows):
        _say(line)
    if asked.plot is not None:
        parallel_simulation.draw(rows, asked.plot, title)
    return rows


def _setting(
    recipe: Recipe, place: Place, length: int | None, grown: bool, threads: int, seconds: float, limit: float
) -> Setting:
    rows, _, target = _full_rows(recipe, length)
    precision = precision_of_run(recipe, place.device).name
    return Setting(recipe, rows, target, grown, place.device.type, threads, precision, seconds, limit)


def _full_rows(recipe: Recipe, length: int | None) -> tuple[int, int, int]:
    """Rows, source and target positions of a batch without padding."""
    if isinstance(recipe.model, LanguageModelSection):
        return recipe.training.batch.size, 0, length or recipe.training.bptt
    target = length or FULL_LENGTH
    return rows_of_batch(recipe.training.batch, target), target, target


def _calibration(setting: Setting, counts: Sequence[int], path: Path | None, say: Say) -> Calibration:
    """What an earlier command measured of this setting, or what is measured now and kept.

    Raises:
        InputError: the file has the figures of something else.
    """
    wanted = (setting.recipe.name, setting.rows, setting.length, setting.device)
    if path is not None and path.exists():
        found = parallel_calibration.read_calibration(path)
        there = (found.recipe, found.batch, found.length, found.device)
        if there != wanted:
            raise InputError(
                f"{path}: of {_words(there)}, not {_words(wanted)}; give another file, which is then measured"
            )
        return found
    say(f"{setting.recipe.name}: times of layers and links")
    found = parallel_calibration.calibrate(setting, max(2, *counts))
    if path is not None:
        parallel_calibration.write_calibration(path, found)
    return found


def _words(of: tuple[str, int, int, str]) -> str:
    recipe, rows, length, device = of
    return f"{recipe}, {rows} rows of {length} on {device}"


def _measured(
    place: Place,
    setting: Setting,
    counts: Sequence[int],
    kinds: Sequence[Kind],
    found: Calibration | None,
    say: Say,
) -> list[Row]:
    """Measures ways to share updates, prints them and the verdict."""
    wanted = parallel_measure.ways(counts, kinds, parallel_measure.stack_of(setting.recipe))
    rows = place.kept(parallel_measure.rows(setting, wanted, say, found))
    figures = ("milliseconds", "tokens/s", "scaling", "exchange %", "MB sent", "peak MB")
    columns = ("division", "rows", *figures, "predicted tokens/s", "off %")
    place.print(rows, columns, _title(setting))
    for row in rows:
        if "failure" in row:
            _say(f"{row['division']}: {row['failure']}")
    for line in parallel_measure.left_out(setting.recipe, counts, kinds):
        _say(line)
    _say(parallel_measure.verdict(rows))
    return rows


def _title(setting: Setting) -> str:
    return (
        f"{setting.recipe.name}, batch {'grown' if setting.grown else 'fixed'}, {setting.precision}: measured"
    )


def _counts(asked: _Asked) -> Sequence[int]:
    return (
        parallel_simulation.RANKS if asked.ranks is None else numbers_of("--ranks", asked.ranks, MOST_RANKS)
    )


def _batches(
    recipe: Recipe, texts: list[Path], length: int | None, of_seed: bool
) -> Mapping[str, Sequence[Batch]]:
    """The shapes of updates: of a text with derived buckets and without, or of full rows."""
    if of_seed or texts:
        counts = counts_of_texts(texts, recipe) if texts else counts_of_figures(PENN_TREEBANK)
        words = vocabulary_sizes(recipe)[:2][-1]
        return {buckets: batches_of_text(recipe, counts, words, buckets) for buckets in get_args(Buckets)}
    rows, source, target = _full_rows(recipe, length)
    return {"full rows": [Batch(rows, source, target, rows * target)]}


def _say(line: str) -> None:
    print("\n".join(wrap(line, WIDTH, subsequent_indent="  ")))
