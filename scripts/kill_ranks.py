"""Kill ranks of a run of several processes at random moments and show that nothing is lost.

A small run of N processes is trained once without interruption. Then the same command is started in another folder
with --max-restarts, and again and again a random rank of it is killed with SIGKILL, while it starts, trains or saves;
at last it may finish. Every parameter and optimizer file must then be the same byte for byte, and metrics.tsv the same
apart from its times.

Example:
    python -m scripts.kill_ranks --kills 40 --processes 2 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console

from econmt.training.folder import ModelFolder
from scripts.kill_test import RECIPE, fingerprints, write_text

BEGINS = "ranks: "
"""What the log says when all ranks are there."""

LONGEST_START = 240.0
"""Seconds after which processes that have not begun to train are taken for broken."""


class Kill(NamedTuple):
    """One kill: which rank, when, the seconds until training went on, and whether one line told of it."""

    rank: int
    moment: str
    seconds: float
    lines: int


def ranks_of(launcher: int) -> dict[int, int]:
    """The processes that a launcher has started, by rank."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        for entry in environment:
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = int(child)
    return found


def begun(folder: ModelFolder) -> int:
    """How often all ranks have begun, by the log."""
    return folder.log.read_text().count(BEGINS) if folder.log.exists() else 0


def start(recipe: Path, processes: int, restarts: int, talk: Path) -> subprocess.Popen[bytes]:
    """Starts the command."""
    command = [sys.executable, "-m", "econmt", "train", str(recipe), "--processes", str(processes)]
    command += ["--max-restarts", str(restarts)] if restarts else []
    with talk.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def wait_for_begin(process: subprocess.Popen[bytes], folder: ModelFolder, number: int, talk: Path) -> None:
    """Waits until the ranks have begun for the ``number``-th time."""
    until = time.monotonic() + LONGEST_START
    while begun(folder) < number:
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise SystemExit(f"the run does not begin:\n{talk.read_text()}")
        time.sleep(0.01)


def kill_some(
    recipe: Path, folder: ModelFolder, options: argparse.Namespace, talk: Path, stretch: float
) -> list[Kill]:
    """Starts the command and kills ranks of it; then it may finish."""
    draw = random.Random(options.seed)
    process = start(recipe, options.processes, options.kills, talk)
    kills: list[Kill] = []
    wait_for_begin(process, folder, 1, talk)
    while len(kills) < options.kills:
        delay = draw.uniform(0.0, stretch)
        moment = f"{delay:.2f} s into training"
        time.sleep(delay)
        if draw.random() < 0.3:
            moment = "while it saves"
            until = time.monotonic() + stretch
            while not folder.temporaries() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.0002)
        there = ranks_of(process.pid) if process.poll() is None else {}
        if len(there) < options.processes:
            break
        rank = draw.randrange(options.processes)
        before, lines = begun(folder), talk.read_text().count("econmt: error")
        killed = time.monotonic()
        os.kill(there[rank], signal.SIGKILL)
        wait_for_begin(process, folder, before + 1, talk)
        told = talk.read_text().count("econmt: error") - lines
        kills.append(Kill(rank, moment, time.monotonic() - killed, told))
    if process.wait() != 0:
        raise SystemExit(f"the run failed:\n{talk.read_text()}")
    return kills


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the test; 0 if nothing was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=40, help="kills at most (default: 40)")
    parser.add_argument("--processes", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--updates", type=int, default=300, help="length of the run (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="of ranks and moments (default: 1)")
    options = parser.parse_args(arguments)
    console = Console(width=100, highlight=False)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_text(place)
        recipe, talk = place / "recipe.yaml", place / "talk"

        def folder(name: str) -> ModelFolder:
            text = RECIPE.format(text=place, output=place / name, updates=options.updates)
            recipe.write_text(text)
            return ModelFolder(place / name)

        whole = folder("whole")
        process = start(recipe, options.processes, 0, talk)
        wait_for_begin(process, whole, 1, talk)
        began = time.monotonic()
        if process.wait() != 0:
            raise SystemExit(f"the run failed:\n{talk.read_text()}")
        trained = time.monotonic() - began
        victim = folder("killed")
        kills = kill_some(recipe, victim, options, talk, 1.2 * trained / options.kills)
        same = fingerprints(whole) == fingerprints(victim)
        lost = "nothing was lost" if same else "SOMETHING DIFFERS"
        seconds = [kill.seconds for kill in kills]
        for number, kill in enumerate(kills, 1):
            console.print(f"{number:3} rank {kill.rank} {kill.moment}: went on after {kill.seconds:.1f} s")
        console.print(
            f"{len(kills)} kills of {options.processes} ranks: {lost}; training went on after {median(seconds):.1f} s "
            f"in the middle, {max(seconds):.1f} s at most; {sum(kill.lines == 1 for kill in kills)} told in one line"
        )
        return 0 if same and all(kill.lines == 1 for kill in kills) else 1


if __name__ == "__main__":
    sys.exit(main())
