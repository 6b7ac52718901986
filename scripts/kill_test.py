"""Kill a training run again and again at random moments and show that nothing is lost.

A small run is trained once without interruption. Then the same command is started in another folder, killed with
SIGKILL at a random moment, started again, and so on; at last it may finish. Every parameter and optimizer file must
then be the same byte for byte, and metrics.tsv the same apart from its times.

Example:
    python scripts/kill_test.py --kills 20 --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.state import TIMES

RECIPE = """\
name: kill-test
output: {output}
data:
  source: src
  target: trg
  train: [{text}/train]
  valid: {text}/valid
  subwords: {{type: words, source: 100, target: 100}}
  prepared: {text}/prepared
model:
  embedding: 64
  encoder: {{layers: 1, size: 128}}
  decoder: {{layers: 1, size: 128}}
  attention: {{size: 128}}
  dropout: 0.2
training:
  batch: {{type: sentence, size: 8}}
  update_interval: 2
  optimizer: {{learning_rate: 0.03}}
  schedule: {{name: plateau-reduce, reduce_num_not_improved: 1}}
  precision: float32
  max_updates: {updates}
  checkpoint_interval: 3
  early_stopping: {{max_num_checkpoint_not_improved: null}}
  keep_last_params: 2
  log_interval: 4
  device: cpu
  threads: 1
  seed: 3
decoding: {{beam_size: 2, max_output_factor: 0.5}}
"""
LONGEST_SAVE = 0.03
"""Seconds within which a kill falls that is meant to hit a checkpoint while it is written."""
LONGEST_START = 120.0
"""Seconds after which a process that has not begun to train is taken for broken."""


class Kill(NamedTuple):
    """One kill: when, and what it left behind."""

    moment: str
    update: int
    unfinished: str


def write_text(folder: Path) -> None:
    """Sentences of letters and their reversal."""
    draw = random.Random(11)
    for name, count in (("train", 400), ("valid", 20)):
        lines = [[draw.choice("abcdefgh") for _ in range(draw.randint(2, 9))] for _ in range(count)]
        (folder / f"{name}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{name}.trg").write_text(
            "".join(" ".join(reversed(line)).upper() + "\n" for line in lines)
        )


def start(recipe: Path, talk: Path) -> subprocess.Popen[bytes]:
    """Starts the command; what it says goes to a file."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    with talk.open("wb") as file:
        command = [sys.executable, "-m", "econmt", "train", str(recipe)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment)


def wait_for_training(process: subprocess.Popen[bytes], talk: Path) -> None:
    """Waits until the process says that it trains, or has ended."""
    began = time.monotonic()
    while process.poll() is None and not talk.stat().st_size:
        if time.monotonic() - began > LONGEST_START:
            process.kill()
            raise SystemExit("the command does not begin to train")
        time.sleep(0.005)


def run_whole(recipe: Path, talk: Path) -> tuple[float, float]:
    """Runs the command to its end; returns the seconds before training began and those after."""
    began = time.monotonic()
    process = start(recipe, talk)
    wait_for_training(process, talk)
    training = time.monotonic()
    if process.wait() != 0:
        raise SystemExit(f"the command failed:\n{talk.read_text()}")
    return training - began, time.monotonic() - training


def kill_once(
    recipe: Path, folder: ModelFolder, talk: Path, draw: random.Random, start_up: float, stretch: float
) -> Kill | None:
    """Starts the command and kills it; None if it had finished before its moment came.

    Args:
        recipe: what to train.
        folder: its model folder.
        talk: file for what the process says.
        draw: chooses the moment: while it trains, while it saves, or while it starts and puts the folder in order.
        start_up: usual seconds before training begins.
        stretch: longest seconds of training.
    """
    process = start(recipe, talk)
    kind = draw.random()
    if kind < 0.15:
        delay = draw.uniform(0.5, 1.1) * start_up
        moment = f"{delay:.3f} s after its start"
    else:
        delay = draw.uniform(0.0, stretch)
        moment = f"{delay:.3f} s into training"
        wait_for_training(process, talk)
    time.sleep(delay)
    if kind > 0.6:
        delay = draw.uniform(0.0, LONGEST_SAVE)
        moment = f"{1000 * delay:.1f} ms into saving"
        while process.poll() is None and not folder.temporaries():
            time.sleep(0.0002)
        time.sleep(delay)
    process.kill()
    if process.wait() == 0:
        return None
    if process.returncode > 0:
        raise SystemExit(f"the command failed:\n{talk.read_text()}")
    commits = folder.commits()
    update = commits[-1].update if commits else 0
    left = [path.name for path in (*folder.temporaries(), *chain.from_iterable(folder.pending().values()))]
    return Kill(moment, update, ", ".join(sorted(left)))


def fingerprints(folder: ModelFolder) -> dict[str, str]:
    """Checksums of all that must not differ, by name."""
    found = {}
    for path in sorted([*folder.path.rglob("*.safetensors"), *folder.path.glob("hypotheses.*")]):
        found[str(path.relative_to(folder.path))] = hashlib.sha256(path.read_bytes()).hexdigest()
    rows = [line.split("\t") for line in folder.metrics.read_text().splitlines()]
    kept = [index for index, column in enumerate(rows[0]) if column not in TIMES]
    text = "\n".join("\t".join(row[index] for index in kept) for row in rows)
    found["metrics.tsv without times"] = hashlib.sha256(text.encode()).hexdigest()
    return found


def show(kills: Sequence[Kill], whole: dict[str, str], killed: dict[str, str], console: Console) -> bool:
    """Prints both tables; whether everything is the same."""
    table = Table(title="kills")
    for column in ("kill", "moment", "saved update", "unfinished files found"):
        table.add_column(column)
    for number, kill in enumerate(kills, 1):
        table.add_row(str(number), kill.moment, str(kill.update), kill.unfinished)
    console.print(table)
    table = Table(title="never killed against killed")
    for column in ("file", "sha256", "the same"):
        table.add_column(column)
    names = sorted({*whole, *killed})
    for name in names:
        same = whole.get(name) == killed.get(name)
        table.add_row(
            name, whole.get(name, "absent")[:16], "yes" if same else f"NO: {killed.get(name, 'absent')[:16]}"
        )
    console.print(table)
    return whole == killed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the test; 0 if nothing was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="kills at least (default: 20)")
    parser.add_argument("--updates", type=int, default=150, help="length of the run (default: 150)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: drawn, and printed)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to work (default: a temporary folder)"
    )
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    console = Console(width=110, highlight=False)
    console.print(f"{options.kills} kills in a run of {options.updates} updates, seed {seed}")
    with tempfile.TemporaryDirectory() as temporary:
        place = options.folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        return _test(place, options.kills, options.updates, random.Random(seed), console)


def _test(place: Path, wanted: int, updates: int, draw: random.Random, console: Console) -> int:
    write_text(place)
    talk = place / "talk"
    recipe = place / "recipe.yaml"

    def prepare_recipe(name: str) -> ModelFolder:
        recipe.write_text(RECIPE.format(text=place, output=place / name, updates=updates))
        return ModelFolder(place / name)

    whole = prepare_recipe("whole")
    start_up, training = run_whole(recipe, talk)
    console.print(f"never killed: {start_up:.1f} s before training, {training:.1f} s of training")
    expected = fingerprints(whole)
    kills: list[Kill] = []
    good = True
    while len(kills) < wanted:
        victim = prepare_recipe(f"killed-{len(kills)}")
        here: list[Kill] = []
        while len(kills) + len(here) < wanted:
            # Moments are spread over what is left to train, so that the run does not end before its last kill.
            left = 1.0 - (here[-1].update if here else 0) / updates
            stretch = 1.5 * training * left / (wanted - len(kills) - len(here) + 1)
            kill = kill_once(recipe, victim, talk, draw, start_up, stretch)
            if kill is None:
                break
            here.append(kill)
        run_whole(recipe, talk)
        good &= show(here, expected, fingerprints(victim), console)
        kills += here
    lost = "nothing was lost" if good else "SOMETHING DIFFERS"
    console.print(
        f"{len(kills)} kills, {sum(bool(kill.unfinished) for kill in kills)} of them while saving: {lost}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
