"""What keeping less costs: milliseconds of a step for each GiB that it no longer keeps, of every setting of a plan.

The settings are those that a byte budget chooses from, each against the one before it; they take turns and the quickest
step of each counts. These are the figures of econmt/memory/prices.py. Example:

    python -m scripts.bench prices --recipe iwslt --shape 32x20x20
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from econmt.config.recipe import Recipe, WordSubwords, load_recipe
from econmt.engine.devices import resolve_device
from econmt.engine.precision import precision_of
from econmt.errors import EconmtError
from econmt.memory.estimate.techniques import Technique, estimate
from econmt.memory.plan.planner import describe
from econmt.memory.plan.prices import settings
from econmt.memory.profiling import Step
from econmt.model import Implementations
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask

GIB = 1 << 30


def task_of(recipe: Recipe) -> TranslationTask:
    """The recipe with the vocabulary sizes that it asks for."""
    words = recipe.data.subwords
    sizes = (words.source, words.target) if isinstance(words, WordSubwords) else (words.size, words.size)
    return TranslationTask(recipe, *sizes)


def measure(
    task: TranslationTask, shape: Shape, device: torch.device, precision: torch.dtype, rounds: int
) -> Table:
    """A row a setting, in the order in which a plan considers them."""
    kind = device.type
    techniques = [
        Technique(describe(setting), setting, precision) for setting in settings(Implementations(), kind)
    ]
    step = Step(task, shape, device)
    quickest = [float("inf")] * len(techniques)
    for round_number in range(rounds + 1):
        for number, technique in enumerate(techniques):
            step.use(technique)
            seconds = step.seconds()
            if round_number:  # the first round warms up
                quickest[number] = min(quickest[number], seconds)
    del step
    kept = [estimate(task, technique, shape, kind).stashed for technique in techniques]
    precision_name = str(precision).removeprefix("torch.")
    table = Table(title=f"{task.recipe.name}, {shape}, {kind}, {precision_name}")
    table.add_column("setting")
    for column in ("ms a step", "MiB kept", "ms for each GiB less"):
        table.add_column(column, justify="right")
    for number, technique in enumerate(techniques):
        price = ""
        freed = kept[number - 1] - kept[number] if number else 0
        if freed > 0:
            price = f"{1000 * (quickest[number] - quickest[number - 1]) * GIB / freed:,.2f}"
        cells = f"{1000 * quickest[number]:,.1f}", f"{kept[number] / 2**20:,.1f}", price
        table.add_row(technique.name, *cells)
    return table


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=Path("iwslt"))
    parser.add_argument("--shape", default="32x20x20", help="sentence pairs x source x target positions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    try:
        recipe = load_recipe(options.recipe)
        device = resolve_device(options.device)
        precision = precision_of(options.precision, device, [recipe]).dtype
    except EconmtError as error:
        parser.error(str(error))
    shape = Shape(*map(int, options.shape.split("x")))
    Console(width=120).print(measure(task_of(recipe), shape, device, precision, options.rounds))


if __name__ == "__main__":
    main()
