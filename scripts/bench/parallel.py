"""Measures gains of several processes, and predicts them.

    python -m scripts.bench parallel iwslt --processes 1,2 --batch grown
    python -m scripts.bench parallel multi30k --processes 1,2 --predict
    python -m scripts.bench parallel iwslt --predict --profile iwslt.json

Times updates that several processes share, each with --threads of its own (1), and predicts them for up to 1,024 ranks.
With --predict and --processes the prediction stands beside the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from econmt.bench.rows import Row
from econmt.config import limits
from econmt.config.recipe import LanguageModelSection, Recipe, load_recipe
from econmt.data.batching.batches import rows_of_batch
from econmt.engine.precision import precision_of_run
from econmt.errors import InputError
from scripts.bench import parallel_measure, parallel_profile
from scripts.bench.cost_model import KINDS, Kind, best, predict
from scripts.bench.frame import Bench, print_wrapped
from scripts.bench.parallel_profile import BETWEEN, LinkName, Profile, Setting

MOST_RANKS = 65_536
FULL_LENGTH = 50
RANKS = "1,2,4,8,16,32,64,128,256,512,1024"


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


def _full_rows(recipe: Recipe, length: int | None) -> tuple[int, int]:
    """Returns rows and positions of a batch without padding."""
    if isinstance(recipe.model, LanguageModelSection):
        return recipe.training.batch.size, length or recipe.training.bptt
    positions = length or FULL_LENGTH
    return rows_of_batch(recipe.training.batch, positions), positions


def _profile(setting: Setting, ranks: int, path: Path | None) -> Profile:
    """Reads the profile of this setting, or measures and writes it; raises InputError if the file is of another one."""
    wanted = (setting.recipe.name, setting.rows, setting.length, setting.device)
    if path is not None and path.exists():
        profile = parallel_profile.read_profile(path)
        setting_of_file = (profile.recipe, profile.batch, profile.length, profile.device)
        if setting_of_file != wanted:
            raise InputError(f"{path}: of {_words(setting_of_file)}, not {_words(wanted)}; give another file")
        return profile
    profile = parallel_profile.profile(setting, ranks)
    if path is not None:
        parallel_profile.write_profile(path, profile)
    return profile


def _words(of: tuple[str, int, int, str]) -> str:
    recipe, rows, length, device = of
    return f"{recipe}, {rows} rows of {length} on {device}"


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


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto", seconds=5.0, threads=1)
    add = bench.add_argument
    add("recipe", help="recipe: a file, or a shipped name")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    add("--processes", metavar="N,N,...", help="processes to measure with (1,2; none with --predict)")
    add("--predict", action="store_true", help="predict for --ranks from times measured here")
    add("--ranks", default=RANKS, metavar="N,N,...", help="with --predict: numbers of ranks to predict for")
    add("--between", choices=BETWEEN, help="with --predict: network between hosts (10gbe; ndr with GPUs)")
    add(
        "--profile", type=Path, help="with --predict: JSON file of the times, read if it exists, else written"
    )
    add("--division", default=",".join(KINDS), help="ways to divide: data, pipeline (of layers), both")
    add("--batch", choices=("fixed", "grown"), default="fixed", help="the recipe's, or that for each rank")
    add("--length", type=int, help="positions of a row; no row has padding (50, or bptt)")
    add("--limit", type=float, default=180.0, help="seconds after which a measurement is given up")
    given = bench.begin(words)
    kinds, counts = kinds_of(given.division), numbers_of("--ranks", given.ranks, MOST_RANKS)
    numbers = numbers_of("--processes", given.processes or "1,2", limits.THREADS)
    _check_gpus(given.device, max(numbers))
    recipe = load_recipe(given.recipe, given.overrides)
    precision = precision_of_run(recipe, given.device).name
    rows, grown = _full_rows(recipe, given.length), given.batch == "grown"
    setting = Setting(
        recipe, *rows, grown, given.device.type, given.threads, precision, given.seconds, given.limit
    )
    measures = given.processes is not None or not given.predict
    wanted = parallel_measure.ways(numbers, kinds, parallel_measure.stack_of(recipe))
    left_out = parallel_measure.left_out(recipe, numbers, kinds)
    if measures and max(numbers) > 1 and len(wanted) == 1:
        raise InputError(*left_out)
    title = f"{recipe.name}, batch {given.batch}, {precision}"
    bench.print_header(title)
    profile = _profile(setting, max(2, *numbers), given.profile) if given.predict else None
    if measures:
        figures = ("milliseconds", "tokens/s", "scaling", "exchange %", "MB sent", "peak MB")
        bench.report(
            parallel_measure.rows(setting, wanted, bench.say, profile),
            f"{title}: measured",
            ("division", "rows", *figures, "predicted tokens/s", "off %"),
        )
        for line in left_out:
            print_wrapped(line)
    if profile is not None:
        columns = ("ranks", "division", "chunks", "milliseconds", "scaling", "exchange %", "MB sent")
        predicted = _predicted(profile, setting, given.between, counts, kinds)
        bench.report(predicted, f"{title}: predicted", columns)
