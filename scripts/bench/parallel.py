"""``python -m scripts.bench parallel``: gains of several processes, measured here and predicted for many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Literal

import torch
import typer

from econmt.bench.rows import Row, Say
from econmt.cli.measuring import BenchSession, Seconds
from econmt.config import limits
from econmt.config.recipe import LanguageModelSection, Recipe
from econmt.data.batching.batches import rows_of_batch
from econmt.engine.precision import precision_of_run
from econmt.errors import InputError
from econmt.options.option_groups import option, with_option_groups
from econmt.options.shared_options import RecipeChoice, check_writable, refuse_idle
from econmt_memory.report.layout import WIDTH
from scripts.bench import parallel_measure, parallel_profile
from scripts.bench.cost_model import KINDS, Kind, best, predict
from scripts.bench.parallel_profile import LinkName, Profile, Setting
from scripts.bench.plots import draw_lines

MOST_RANKS = 65_536
FULL_LENGTH = 50
ALL_KINDS = ",".join(KINDS)
RANKS = "1,2,4,8,16,32,64,128,256,512,1024"


@dataclass(frozen=True)
class Prediction:
    """Options of the prediction for many ranks."""

    to_predict: bool = option(False, "--predict", help="Predict for --ranks from times measured here.")
    ranks: str = option(RANKS, help="With --predict: numbers of ranks to predict for.", metavar="N,N,...")
    between: LinkName | None = option(
        None, help="With --predict: network between hosts.", show_default="10gbe; ndr with GPUs"
    )
    profile: Path | None = option(
        None,
        help="With --predict: JSON file of the times measured here; read if it exists, else measured and written.",
    )


@dataclass
class ParallelSession(BenchSession):
    """Session of several processes with threads of their own."""

    threads: int = option(1, help="CPU threads of each process.", min=1, max=limits.THREADS)


def numbers_of(option: str, text: str, most: int) -> list[int]:
    """Reads whole numbers from 1, such as "1,2,4"; raises InputError for any other text."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= most for part in parts):
        raise InputError(f"{option} '{text}': give numbers from 1 to {most:,} with commas between, as 1,2,4")
    return sorted({int(part) for part in parts})


def kinds_of(text: str) -> list[Kind]:
    """Reads kinds of division, such as "data,pipeline,both"; raises InputError if one is unknown."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise InputError(f"--division '{text}': give some of {', '.join(KINDS)} with commas between")
    return [kind for kind in KINDS if kind in names]


@with_option_groups
def parallel_command(
    context: typer.Context,
    *,
    recipe: RecipeChoice,
    processes: str | None = option(
        None,
        help="Numbers of processes to measure with.",
        metavar="N,N,...",
        show_default="1,2; none with --predict",
    ),
    prediction: Prediction,
    division: str = option(
        ALL_KINDS, help="Ways to divide the work: data, pipeline (of layers), both.", metavar="NAME,..."
    ),
    batch: Literal["fixed", "grown"] = option(
        "fixed", help="Batch of all ranks together: fixed: the recipe's; grown: the recipe's for each rank."
    ),
    length: int | None = option(
        None, help="Positions of a row; no row has padding.", min=2, show_default="50, or bptt"
    ),
    seconds: Seconds = option(5.0, help="Seconds for each measurement."),
    limit: Seconds = option(180.0, help="Seconds after which a measurement is given up."),
    session: ParallelSession,
) -> None:
    """Time updates that several processes share, and predict them for up to 1,024 ranks.

    With --predict and --processes the prediction stands beside the measurement.

    \b
    Example:
      python -m scripts.bench parallel iwslt --processes 1,2 --batch grown
      python -m scripts.bench parallel multi30k --processes 1,2 --predict
      python -m scripts.bench parallel iwslt --predict --profile iwslt.json
    """
    kinds, counts = kinds_of(division), numbers_of("--ranks", prediction.ranks, MOST_RANKS)
    to_predict = prediction.to_predict
    if not to_predict:
        why = "is for --predict; give that, or leave it out"
        refuse_idle(context, why, "ranks", "between", "profile")
    check_writable(prediction.profile)
    numbers = numbers_of("--processes", processes or "1,2", limits.THREADS)
    _check_gpus(session.device, max(numbers))
    loaded = recipe.load()
    rows, positions = _full_rows(loaded, length)
    precision = precision_of_run(loaded, session.device).name
    grown = batch == "grown"
    device = session.device.type
    setting = Setting(loaded, rows, positions, grown, device, session.threads, precision, seconds, limit)
    measures = processes is not None or not to_predict
    if measures:
        _check_divisible(loaded, numbers, kinds)
    profile = None
    with session.measuring() as say:
        if to_predict:
            profile = _profile(setting, max(2, *numbers), prediction.profile, say)
        measured = _measure(session, setting, numbers, kinds, profile, say) if measures else []
    title = f"{loaded.name}, batch {batch}, {precision}"
    if profile is None:
        session.draw(measured, label=("division",), value="tokens/s", title=title)
        return
    predicted = session.kept(_predicted(profile, setting, prediction.between, counts, kinds))
    columns = ("ranks", "division", "chunks", "milliseconds", "scaling", "exchange %", "MB sent")
    session.print(predicted, columns, f"{title}: predicted")
    if session.plot is not None:
        _draw(predicted, session.plot, f"{title}: predicted")


def _check_gpus(device: torch.device, processes: int) -> None:
    """Raises InputError if the processes cannot have a GPU each."""
    if device.type != "cuda":
        return
    if str(device) != "cuda":
        raise InputError(f"--device {device}: each process has a GPU of its own; give cuda")
    if processes > torch.cuda.device_count():
        raise InputError(
            f"--processes {processes}: this machine has {torch.cuda.device_count()} GPUs; give fewer"
        )


def _check_divisible(recipe: Recipe, counts: Sequence[int], kinds: Sequence[Kind]) -> None:
    """Raises InputError if no division of several processes can be measured."""
    wanted = parallel_measure.ways(counts, kinds, parallel_measure.stack_of(recipe))
    if max(counts) > 1 and len(wanted) == 1:
        raise InputError(*parallel_measure.left_out(recipe, counts, kinds))


def _full_rows(recipe: Recipe, length: int | None) -> tuple[int, int]:
    """Returns rows and positions of a batch without padding."""
    if isinstance(recipe.model, LanguageModelSection):
        return recipe.training.batch.size, length or recipe.training.bptt
    positions = length or FULL_LENGTH
    return rows_of_batch(recipe.training.batch, positions), positions


def _profile(setting: Setting, ranks: int, path: Path | None, say: Say) -> Profile:
    """Reads the profile of this setting, or measures and writes it; raises InputError if the file is of another one."""
    wanted = (setting.recipe.name, setting.rows, setting.length, setting.device)
    if path is not None and path.exists():
        profile = parallel_profile.read_profile(path)
        setting_of_file = (profile.recipe, profile.batch, profile.length, profile.device)
        if setting_of_file != wanted:
            raise InputError(f"{path}: of {_words(setting_of_file)}, not {_words(wanted)}; give another file")
        return profile
    say(f"{setting.recipe.name}: times of updates, layers and links")
    profile = parallel_profile.profile(setting, ranks)
    if path is not None:
        parallel_profile.write_profile(path, profile)
    return profile


def _words(of: tuple[str, int, int, str]) -> str:
    recipe, rows, length, device = of
    return f"{recipe}, {rows} rows of {length} on {device}"


def _measure(
    session: BenchSession,
    setting: Setting,
    counts: Sequence[int],
    kinds: Sequence[Kind],
    profile: Profile | None,
    say: Say,
) -> list[Row]:
    """Measures ways to share updates, prints them and the verdict."""
    wanted = parallel_measure.ways(counts, kinds, parallel_measure.stack_of(setting.recipe))
    rows = session.kept(parallel_measure.rows(setting, wanted, say, profile))
    figures = ("milliseconds", "tokens/s", "scaling", "exchange %", "MB sent", "peak MB")
    title = f"{setting.recipe.name}, batch {'grown' if setting.grown else 'fixed'}, {setting.precision}"
    session.print(rows, ("division", "rows", *figures, "predicted tokens/s", "off %"), f"{title}: measured")
    lines = [f"{row['division']}: {row['failure']}" for row in rows if "failure" in row]
    lines += parallel_measure.left_out(setting.recipe, counts, kinds)
    for line in (*lines, parallel_measure.verdict(rows)):
        print("\n".join(wrap(line, WIDTH, subsequent_indent="  ")))
    return rows


def _predicted(
    profile: Profile, setting: Setting, between: LinkName | None, counts: Sequence[int], kinds: Sequence[Kind]
) -> Iterator[Row]:
    """Yields the best division of each kind for each number of ranks."""
    step, network = profile.step, profile.network(between)
    one = predict(step, network, 1, 1, setting.rows)
    for count in counts:
        rows = setting.rows * (count if setting.grown else 1)
        for kind in kinds:
            each = best(step, network, count, kind, rows)
            if each is not None:
                yield {
                    "bench": "parallel-prediction",
                    "recipe": setting.recipe.name,
                    "ranks": count,
                    "kind": kind,
                    "division": parallel_measure.division_text(each.replicas, each.stages),
                    "chunks": " + ".join(map(str, each.chunks)),
                    "milliseconds": 1e3 * each.seconds,
                    "scaling": one.seconds / each.seconds * rows / setting.rows,
                    "exchange %": 100.0 * each.exchange / each.seconds,
                    "MB sent": each.sent / 1e6,
                }


def _draw(found: Sequence[Mapping[str, str | int | float]], path: Path, title: str) -> None:
    """Draws scaling against ranks, a line for each kind of division."""
    lines: dict[str, dict[int, float]] = {}
    for row in found:
        lines.setdefault(str(row["kind"]), {})[int(row["ranks"])] = float(row["scaling"])
    ranks = {int(row["ranks"]) for row in found}
    lines["as many times as ranks"] = {count: float(count) for count in ranks}
    axes = "ranks", "tokens a second, relative to one rank"
    draw_lines(lines, path, axes=axes, title=title, across={})
