"""Compares the processor time of a step with a plain loop.

    python -m scripts.bench compare.processor-time --data-dir corpora --precision bfloat16

On a machine that other programs share, seconds of the clock tell more of them than of the step; processor time also
grows when caches are shared, but for both sides alike. Model, token files and batches are those of `compare.run`
(README.md); each side is a process of its own, and they take turns of a few updates. econmt keeps the gates and
recomputes the rest, as its runs on the CPU do.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from econmt.bench.rows import Row
from econmt.config.recipe import parse_recipe
from econmt.data.batching.store import open_prepared
from econmt.engine.precision import NAMED
from econmt.engine.step import TrainingStep
from econmt.tasks.registry import make_task
from econmt_ops.dispatch.rule import rules_only
from scripts.bench.frame import Bench, ratio_of

from .launchers import plain
from .make_data import RECIPE, make_data
from .run import CACHE
from .tools.econmt import MODEL

WARM_UP = 30
"""Updates before the first turn."""
Update = Callable[[], int]
"""Function that runs one update and returns its number of target tokens."""


class Turn(NamedTuple):
    """Measurements of one turn: target tokens, processor and clock seconds, minor page faults, peak memory in KB."""

    tokens: int
    processor: float
    clock: float
    faults: int
    peak: int


def econmt_update(data: Path, precision: str) -> Update:
    """Returns the training step of econmt, without the measurements at the start of a run."""
    recipe = parse_recipe(yaml.safe_dump(yaml.safe_load(RECIPE + MODEL)), "the comparison's recipe")
    prepared = open_prepared(data / "store")
    task = make_task(recipe, prepared)
    step = TrainingStep(task, task.build_model().train(), NAMED[precision])
    step.implementations = step.implementations._replace(stash="gates")
    batches = task.batches(prepared)

    def update() -> int:
        batch = next(batches)
        with rules_only():
            float(step([batch]).loss)
        return batch.target_tokens

    return update


def plain_update(data: Path, precision: str) -> Update:
    """Returns the step of `launchers/plain.py`."""
    _, updates = plain.training(data)

    def update() -> int:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            return next(updates)[0]

    return update


SIDES = {"econmt": econmt_update, "plain": plain_update}
_updates: list[Update] = []
"""Update of the side that this process computes."""


def start(side: str, data: Path, precision: str, threads: int) -> None:
    """Makes the update of a side in a process of its own, and warms it up."""
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    _updates.append(SIDES[side](data, precision))
    turn(WARM_UP)


def turn(updates: int) -> Turn:
    """Runs some updates and measures them."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    tokens = sum(_updates[0]() for _ in range(updates))
    after, clock = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Turn(tokens, processor, clock, after.ru_minflt - before.ru_minflt, after.ru_maxrss)


def row_of(side: str, turns: Sequence[Turn], updates: int) -> Row:
    """Returns the row of a side."""
    tokens, processor, clock, faults, _ = map(sum, zip(*turns, strict=True))
    return {
        "side": side,
        "target tokens per processor s": round(tokens / processor),
        "target tokens/s": round(tokens / clock),
        "ms an update": 1e3 * processor / (updates * len(turns)),
        "page faults an update": round(faults / (updates * len(turns))),
        "peak MB": round(turns[-1].peak / 1e3),
    }


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, turns=10, threads=1)
    add = bench.add_argument
    add("--precision", choices=("float32", "bfloat16"), default="bfloat16", help="of both sides (bfloat16)")
    add("--updates", type=int, default=5, help="of a turn (5)")
    add("--data-dir", type=Path, help="folder with multi30k/")
    add("--work", type=Path, default=CACHE / "work", help="token files")
    given = bench.begin(words)
    data = given.work.resolve() / "data"
    make_data(data, given.data_dir)
    bench.print_header(given.precision)
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        sides = {}
        for side in SIDES:
            options = side, data, given.precision, given.threads
            context = multiprocessing.get_context("spawn")
            sides[side] = stack.enter_context(ProcessPoolExecutor(1, context, start, options))
        for number in range(given.turns + 1):
            for side, process in sides.items():
                measured = process.submit(turn, given.updates if number else 0).result()
                if number:  # the first waits for the warm-up
                    turns[side].append(measured)
    bench.report(row_of(side, of_side, given.updates) for side, of_side in turns.items())
    seconds = {side: [each.processor / each.tokens for each in of_side] for side, of_side in turns.items()}
    print(f"econmt to plain: {ratio_of(seconds['plain'], seconds['econmt'])}")
