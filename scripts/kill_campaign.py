"""Kill training runs at random moments and show that nothing is lost and that no process stays.

Each kind of run is trained once without interruption. Then, again and again, the same command is started in a new
folder, and the process, its launcher or one of its ranks is killed with SIGKILL: while Python starts, while torch is
imported, while ranks meet, while it trains, or while it writes a checkpoint. No process of the run may live ten seconds
later. The same command then finishes the run (ranks that were lost are started again by --max-restarts in half of
their kills). Every parameter and optimizer file must be the same byte for byte as without a kill, and metrics.tsv
apart from its times.

Example:
    python -m scripts.kill_campaign --kills 60 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from econmt.checkpoint.folder import ModelFolder
from scripts.kill_test import RECIPE, fingerprints, write_text
from scripts.processes_of_run import (
    connections_to,
    environment_with_mark,
    imports_torch,
    port_of,
    processes_of_run,
    ranks_of_run,
    seconds_until_all_ended,
)

LANGUAGE_MODEL = """\
name: kill-test
task: language_model
output: {output}
data:
  text: src
  train: [{text}/train]
  valid: {text}/valid
  subwords: {{type: words, size: 100}}
  prepared: {text}/prepared-text
model: {{embedding: 128, size: 128, layers: 2}}
training:
  batch: {{size: 8}}
  bptt: 16
  precision: float32
  optimizer: {{name: sgd, learning_rate: 1.0}}
  max_updates: {updates}
  checkpoint_interval: 3
  early_stopping: {{max_num_checkpoint_not_improved: null}}
  keep_last_params: 2
  log_interval: 4
  device: cpu
  threads: 1
  seed: 3
"""

ENDED = 10.0
"""Seconds in which all processes of a run have ended after its launcher was killed."""

LONGEST = 300.0
"""Seconds after which a run is taken for broken."""


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        name: how it is called in the table.
        recipe: template of its recipe.
        processes: number of processes.
        victims: who is killed, drawn anew each time: ``launcher`` (of one process the process itself) or ``rank``.
        options: words of the command line beside.
    """

    name: str
    recipe: str
    processes: int
    victims: tuple[str, ...]
    options: tuple[str, ...] = ()


KINDS = (
    Kind("translation, one process", RECIPE, 1, ("launcher",)),
    Kind("translation, two ranks, launcher killed", RECIPE, 2, ("launcher",)),
    Kind("translation, two ranks, a rank killed", RECIPE, 2, ("rank",)),
    Kind("language model, two ranks", LANGUAGE_MODEL, 2, ("launcher", "rank")),
    Kind(
        "language model, pipeline of two", LANGUAGE_MODEL, 2, ("launcher", "rank"), ("parallel.pipeline=2",)
    ),
)


@dataclass
class Kill:
    """One kill.

    Attributes:
        kind: the kind of run.
        victim: who was killed.
        moment: when.
        ended: seconds until no process was left.
        lines: lines that told of it.
        same: True if the final files are those of the run that was never killed.
    """

    kind: str
    victim: str
    moment: str
    ended: float
    lines: int
    same: bool


class Run:
    """One start of the command."""

    def __init__(self, recipe: Path, folder: ModelFolder, kind: Kind, *options: str) -> None:
        self.folder, self.kind = folder, kind
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self._said = recipe.with_suffix(".said")
        several = ["--processes", str(kind.processes)] if kind.processes > 1 else []
        command = [sys.executable, "-m", "econmt", "train", str(recipe), f"output={folder.path}"]
        with self._said.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, *kind.options, *several, *options],
                stdout=file,
                stderr=file,
                env=environment_with_mark(self.mark),
            )

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks; of one process its own as rank 0."""
        return {0: self.process.pid} if self.kind.processes == 1 else ranks_of_run(self.mark)

    def wait_until(self, reached: Callable[[], object]) -> bool:
        """Waits for a moment; False if the run has ended before."""
        until = time.monotonic() + LONGEST
        while not reached():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > until:
                raise SystemExit(f"the run does not go on:\n{self._said.read_text()}")
            time.sleep(0.0005)
        return True

    def finish(self) -> str:
        """Waits for the end; returns what the run said."""
        code = self.process.wait(LONGEST)
        said = self._said.read_text()
        if code != 0:
            raise SystemExit(f"the run failed with exit code {code}:\n{said}")
        return said

    def said(self) -> str:
        """What the run has said so far."""
        return self._said.read_text()


def wait_for_moment(run: Run, moment: str, stretch: float, draw: random.Random) -> bool:
    """Waits until a run comes to a moment; False if it has ended before."""
    count = run.kind.processes

    def meets() -> bool:
        ranks = run.ranks()
        return len(ranks) == count and connections_to(port_of(ranks[0])) > 1

    if moment == "start of Python":
        return run.wait_until(lambda: len(run.ranks()) == count)
    if moment == "import of torch":
        found = run.wait_until(lambda: any(map(imports_torch, run.ranks().values())))
        time.sleep(draw.uniform(0.0, 1.0))
        return found
    if moment == "ranks meet":
        return run.wait_until(meets)
    begun = len(run.folder.commits())
    trains = run.wait_until(lambda: len(run.folder.commits()) > begun or run.folder.temporaries())
    time.sleep(draw.uniform(0.0, stretch))
    return trains and (moment == "training" or run.wait_until(run.folder.temporaries))


def kill_once(
    recipe: Path,
    folder: ModelFolder,
    kind: Kind,
    expected: dict[str, str],
    stretch: float,
    draw: random.Random,
) -> Kill | None:
    """Starts a run, kills it, and finishes it; None if it had ended before its moment came."""
    victim = draw.choice(kind.victims)
    moments = ["start of Python", "import of torch", "training", "training", "checkpoint", "checkpoint"]
    moment = draw.choice([*moments, "ranks meet"] if kind.processes > 1 else moments)
    again = victim == "rank" and draw.random() < 0.5
    run = Run(recipe, folder, kind, *(["--max-restarts", "1"] if again else []))
    if not wait_for_moment(run, moment, stretch, draw):
        return None
    ranks = run.ranks()
    pid = run.process.pid if victim == "launcher" else ranks.get(draw.randrange(kind.processes))
    if pid is None or run.process.poll() is not None:
        return None
    os.kill(pid, signal.SIGKILL)
    ended = float("nan")
    if again:
        said = run.finish()
    else:
        ended = seconds_until_all_ended(run.mark, ENDED)
        run.process.wait(LONGEST)
        said = run.said()
        Run(recipe, folder, kind).finish()
    if processes_of_run(run.mark):
        ended = float("inf")
    same = fingerprints(folder) == expected
    how = ", started again" if again else ""
    return Kill(kind.name, victim, moment + how, ended, said.count("econmt: error: "), same)


def prepare_kind(place: Path, number: int, kind: Kind, updates: int) -> tuple[Path, ModelFolder, float]:
    """Trains a kind of run without a kill; returns its recipe, its folder and the seconds of training."""
    recipe, begun = place / f"{number}.yaml", place / f"{number}.begun"
    recipe.write_text(kind.recipe.format(text=place, output=begun, updates=updates))
    if "parallel.pipeline=2" in kind.options:  # its division is measured once, when the run begins
        Run(recipe, ModelFolder(begun), kind, "training.max_updates=3").finish()
    whole = new_folder(place, number, "whole")
    run = Run(recipe, whole, kind)
    before = len(whole.commits())
    run.wait_until(lambda: len(whole.commits()) > before)
    began = time.monotonic()
    run.finish()
    return recipe, whole, time.monotonic() - began


def new_folder(place: Path, number: int, name: str) -> ModelFolder:
    """Makes the folder of a run, which begins as all of its kind."""
    begun, folder = place / f"{number}.begun", place / f"{number}.{name}"
    if begun.exists():
        shutil.copytree(begun, folder)
    return ModelFolder(folder)


def show(kills: Sequence[Kill], console: Console) -> bool:
    """Prints the figures; returns True if nothing was lost and no process stayed."""
    table = Table(title="kills")
    for column in (
        "run",
        "kills",
        "same bits",
        "no process left",
        "seconds until then, at most",
        "told in one line",
    ):
        table.add_column(column)
    for kind in dict.fromkeys(kill.kind for kill in kills):
        here = [kill for kill in kills if kill.kind == kind]
        alone = [kill.ended for kill in here if kill.ended == kill.ended]
        ranks = [kill.lines == 1 for kill in here if kill.victim == "rank"]
        table.add_row(
            kind,
            str(len(here)),
            str(sum(kill.same for kill in here)),
            str(sum(kill.ended != float("inf") for kill in here)),
            f"{max(alone):.2f}" if alone else "-",
            f"{sum(ranks)} of {len(ranks)}" if ranks else "-",
        )
    console.print(table)
    moments = Counter(kill.moment for kill in kills)
    console.print(", ".join(f"{moment}: {count}" for moment, count in sorted(moments.items())))
    good = all(k.same and k.ended != float("inf") and (k.victim != "rank" or k.lines == 1) for k in kills)
    console.print(f"{len(kills)} kills: {'nothing was lost' if good else 'SOMETHING IS WRONG'}")
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the campaign; 0 if nothing was lost and no process stayed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60, help="number of kills (default: 60)")
    parser.add_argument("--updates", type=int, default=24, help="length of a run (default: 24)")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments (default: 1)")
    options = parser.parse_args(arguments)
    console = Console(width=130, highlight=False)
    draw = random.Random(options.seed)
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_text(place)
        made = [prepare_kind(place, number, kind, options.updates) for number, kind in enumerate(KINDS)]
        expected = [fingerprints(whole) for _, whole, _ in made]
        tries = 0
        while len(kills) < options.kills:
            number = len(kills) % len(KINDS)
            recipe, _, trained = made[number]
            tries += 1
            folder = new_folder(place, number, str(tries))
            kill = kill_once(recipe, folder, KINDS[number], expected[number], 0.7 * trained, draw)
            if kill is not None:
                kills.append(kill)
                console.print(f"{len(kills):3} {kill.kind}: {kill.victim}, {kill.moment}: {kill.ended:.2f} s")
            shutil.rmtree(folder.path, ignore_errors=True)
    return 0 if show(kills, console) else 1


if __name__ == "__main__":
    sys.exit(main())
