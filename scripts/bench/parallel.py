"""Measures gains of several processes.

    python -m scripts.bench parallel iwslt --processes 1,2 --batch grown

Times updates that several processes share, each with --threads of its own (1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from econmt.config import limits
from econmt.config.recipe import LanguageModelSection, Recipe, load_recipe
from econmt.data.batching.batches import rows_of_batch
from econmt.engine.precision import precision_of_run
from econmt.errors import InputError
from scripts.bench import parallel_measure
from scripts.bench.frame import Bench
from scripts.bench.parallel_measure import KINDS, Kind, Setting

FULL_LENGTH = 50


def numbers_of(text: str) -> list[int]:
    """Reads whole numbers from 1, such as "1,2,4"; raises ValueError for any other text."""
    numbers = sorted({int(part) for part in text.split(",")})
    if numbers[0] < 1 or numbers[-1] > limits.THREADS:
        raise ValueError(text)
    return numbers


def kinds_of(text: str) -> list[Kind]:
    """Reads kinds of division, such as "data,pipeline"; raises ValueError if one is unknown."""
    names = [KINDS[KINDS.index(name)] for name in text.split(",")]
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


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto", seconds=5.0, threads=1)
    add = bench.add_argument
    add("recipe", help="recipe: a file, or a shipped name")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the recipe")
    add("--processes", type=numbers_of, default=[1, 2], metavar="N,N,...", help="processes (%(default)s)")
    text = "ways to divide: data, pipeline (of layers); default: both"
    add("--division", type=kinds_of, default=list(KINDS), metavar="WAY,...", help=text)
    add("--batch", choices=("fixed", "grown"), default="fixed", help="the recipe's, or that for each rank")
    add("--length", type=int, help="positions of a row; no row has padding (50, or bptt)")
    add("--limit", type=float, default=180.0, help="seconds after which a measurement is given up")
    given = bench.begin(words)
    _check_gpus(given.device, max(given.processes))
    recipe = load_recipe(given.recipe, given.overrides)
    precision = precision_of_run(recipe, given.device).name
    rows, grown = _full_rows(recipe, given.length), given.batch == "grown"
    setting = Setting(
        recipe, *rows, grown, given.device.type, given.threads, precision, given.seconds, given.limit
    )
    title = f"{recipe.name}, batch {given.batch}, {precision}"
    bench.print_header(title)
    figures = ("milliseconds", "tokens/s", "scaling", "exchange %", "MB sent", "peak MB")
    wanted = parallel_measure.ways(given.processes, given.division)
    bench.report(parallel_measure.rows(setting, wanted, bench.say), title, ("division", "rows", *figures))
