"""Compares the processor time of a step with a plain loop.

    python -m scripts.bench compare.processor-time --data-dir corpora --precision bfloat16

On a machine that other programs share, seconds of the clock tell more of them than of the step; processor time also
grows when caches are shared, but for both sides alike. Model, token files and batches are those of `compare.run`
(README.md); each side is a process of its own, and they take turns of a few updates. econmt keeps the gates and
recomputes the rest, as its runs on the CPU do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import nn

from econmt.config.recipe import parse_recipe
from econmt.data.batching.store import open_prepared
from econmt.engine.precision import NAMED
from econmt.engine.step import TrainingStep
from econmt.tasks.registry import make_task
from econmt_ops.dispatch.rule import rules_only
from scripts.bench.arguments import parser_of
from scripts.bench.plain_model import PAD, PlainModel, Sizes

from . import toolkit as matched
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
    text = plain.read_text(data, "train")
    model = PlainModel(Sizes(*text.sizes), packed=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=matched.LEARNING_RATE, fused=True)
    batches = plain.batches(text, seed=1)

    def update() -> int:
        source, lengths, target = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model.loss(source, lengths, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), matched.CLIP_NORM)
        optimizer.step()
        return int((target[:, 1:] != PAD).sum())

    return update


SIDES = {"econmt": econmt_update, "plain": plain_update}


def run_turn(update: Update, updates: int) -> Turn:
    """Runs some updates and measures them."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    tokens = sum(update() for _ in range(updates))
    after, clock = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Turn(tokens, processor, clock, after.ru_minflt - before.ru_minflt, after.ru_maxrss)


def serve(side: str, data: Path, precision: str, threads: int) -> None:
    """Runs one side: a turn for each number of updates that it reads."""
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    update = SIDES[side](data, precision)
    run_turn(update, WARM_UP)
    for line in sys.stdin:
        print(json.dumps(run_turn(update, int(line))), flush=True)


class Side:
    """Process of one side."""

    def __init__(self, name: str, options: argparse.Namespace, data: Path) -> None:
        command = [sys.executable, "-m", "scripts.bench", "compare.processor-time", "--serve", name]
        command += ["--work", data.parent, "--precision", options.precision, "--threads", options.threads]
        pipe = subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        words = [str(word) for word in command]
        self._name = name
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.turns: list[Turn] = []

    def take_turn(self, updates: int) -> Turn:
        """Runs some updates while the other side waits; exits with a message if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{updates}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self._name}: ended with code {self._process.wait()}; the reason stands above")
        self.turns.append(Turn(*json.loads(answer)))
        return self.turns[-1]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--precision", choices=("float32", "bfloat16"), default="bfloat16", help="of both sides (bfloat16)")
    add("--threads", type=int, default=1, help="of each side (1)")
    add("--turns", type=int, default=10, help="of each side (10)")
    add("--updates", type=int, default=5, help="of a turn (5)")
    add("--data-dir", type=Path, help="folder with multi30k/")
    add("--work", type=Path, default=CACHE / "work", help="token files")
    add("--serve", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    data = options.work.resolve() / "data"
    if options.serve:
        serve(options.serve, data, options.precision, options.threads)
        return 0
    make_data(data, options.data_dir, None)
    sides = {name: Side(name, options, data) for name in SIDES}
    ratios = []
    for number in range(options.turns + 1):
        speeds = {}
        for name, side in sides.items():
            turn = side.take_turn(options.updates if number else 0)  # the first waits for the warm-up
            speeds[name] = turn.tokens / turn.processor if number else 0.0
        if number:
            ratios.append(speeds["econmt"] / speeds["plain"])
    for name, side in sides.items():
        side.close()
        turns = side.turns[1:]
        tokens, updates = sum(turn.tokens for turn in turns), options.updates * len(turns)
        faults = sum(turn.faults for turn in turns) / updates
        processor, clock = sum(turn.processor for turn in turns), sum(turn.clock for turn in turns)
        print(
            f"{name}: {tokens / processor:,.0f} target tokens per processor second, {tokens / clock:,.0f} per second, "
            f"{1e3 * processor / updates:.0f} ms an update, {faults:,.0f} page faults, "
            f"peak {turns[-1].peak / 1e3:,.0f} MB"
        )
    print(f"econmt to plain: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
