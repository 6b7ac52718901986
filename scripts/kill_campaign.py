"""Kills training runs at random moments and checks that nothing is lost and that no process stays.

Each kind of run is trained once without interruption. Then the same command is started in a new folder, and the
process, its launcher or one of its ranks is killed with SIGKILL: while Python starts, while torch is imported, while
ranks meet, while it trains, or while it writes a checkpoint. No process of the run may live ten seconds later. The same
command then finishes the run (in half of the kills of a rank, --max-restarts starts the lost ranks again). Every
parameter and optimizer file must then equal that of the undisturbed run byte for byte, and so must metrics.tsv without
its times.

Examples:
    python -m scripts.kill_campaign --kills 60 --seed 1
    python -m scripts.kill_campaign --kinds translation --kills 20
"""

from __future__ import annotations

import argparse
import hashlib
import math
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
from typing import Any

from econmt.bench.rows import Row
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.state import TIMES
from scripts.bench.frame import print_rows
from tests.unit.parallel.processes_of_run import (
    connections_to,
    environment_with_mark,
    imports_torch,
    port_of,
    processes_of_run,
    ranks_of_run,
    seconds_until_all_ended,
)

RECIPE = """\
name: kill-test
output: {{output}}
data: {{{{prepared: {{text}}/prepared-{task}, train: [{{text}}/train], valid: {{text}}/valid, {data}}}}}
{model}
training:
  batch: {{{{size: 8}}}}
  precision: float32
  max_updates: {{updates}}
  checkpoint_interval: 3
  early_stopping: {{{{max_num_checkpoint_not_improved: null}}}}
  keep_last_params: 2
  log_interval: 4
  device: cpu
  threads: 1
  seed: 3
  {training}
"""
TRANSLATION = RECIPE.format(
    task="translation",
    data="source: src, target: trg, subwords: {{type: words, source: 100, target: 100}}",
    model="""\
model: {{embedding: 64, encoder: {{size: 128}}, decoder: {{size: 128}}, attention: {{size: 128}}, dropout: 0.2}}
decoding: {{beam_size: 2, max_output_factor: 0.5}}""",
    training="""\
update_interval: 2
  optimizer: {{learning_rate: 0.03}}
  schedule: {{name: plateau-reduce, reduce_num_not_improved: 1}}""",
)
LANGUAGE_MODEL = RECIPE.format(
    task="text",
    data="text: src, subwords: {{type: words, size: 100}}",
    model="task: language_model\nmodel: {{embedding: 128, size: 128, layers: 2}}",
    training="bptt: 16\n  optimizer: {{name: sgd, learning_rate: 1.0}}",
)
"""Templates of recipes, with the fields output, text and updates."""

Kill = dict[str, Any]
"""A process that was killed, and what became of its run; see `kill_once`."""

ENDED = 10.0
"""Seconds within which all processes of a run end after its launcher is killed."""

LONGEST = 300.0
"""Seconds after which a run counts as broken."""


@dataclass(frozen=True)
class Kind:
    """Kind of run to kill.

    Attributes:
        name: Name in the table.
        recipe: Template of its recipe.
        processes: Number of processes.
        victims: Processes that may be killed: ``launcher`` (the only process of a run without ranks) or ``rank``.
        options: Further words of the command line.
    """

    name: str
    recipe: str
    processes: int
    victims: tuple[str, ...]
    options: tuple[str, ...] = ()


KINDS = (
    Kind("translation, one process", TRANSLATION, 1, ("launcher",)),
    Kind("translation, two ranks, launcher killed", TRANSLATION, 2, ("launcher",)),
    Kind("translation, two ranks, a rank killed", TRANSLATION, 2, ("rank",)),
    Kind("language model, two ranks", LANGUAGE_MODEL, 2, ("launcher", "rank")),
    Kind(
        "language model, pipeline of two", LANGUAGE_MODEL, 2, ("launcher", "rank"), ("parallel.pipeline=2",)
    ),
)


class Run:
    """Call of ``econmt train`` in a process of its own."""

    def __init__(self, recipe: Path, folder: ModelFolder, kind: Kind, *options: str) -> None:
        self.folder, self.kind = folder, kind
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self._said = recipe.with_suffix(".said")
        several = ["--processes", str(kind.processes)] if kind.processes > 1 else []
        command = [sys.executable, "-m", "econmt", "train", str(recipe), f"output={folder.path}"]
        with self._said.open("wb") as file:
            command += [*kind.options, *several, *options]
            environment = environment_with_mark(self.mark)
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def ranks(self) -> dict[int, int]:
        """Returns the process ids by rank; a single process is rank 0."""
        return {0: self.process.pid} if self.kind.processes == 1 else ranks_of_run(self.mark)

    def wait_until(self, reached: Callable[[], object]) -> bool:
        """Waits for a condition; returns False if the run ends first."""
        until = time.monotonic() + LONGEST
        while not reached():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > until:
                raise SystemExit(f"the run hangs:\n{self._said.read_text()}")
            time.sleep(0.0005)
        return True

    def finish(self) -> str:
        """Waits for the end; returns the output."""
        code = self.process.wait(LONGEST)
        said = self._said.read_text()
        if code != 0:
            raise SystemExit(f"the run failed with exit code {code}:\n{said}")
        return said

    def said(self) -> str:
        """Returns the output so far."""
        return self._said.read_text()


def write_text(folder: Path) -> None:
    """Writes sentences of letters and their reversals."""
    draw = random.Random(11)
    for name, count in (("train", 400), ("valid", 20)):
        lines = [[draw.choice("abcdefgh") for _ in range(draw.randint(2, 9))] for _ in range(count)]
        for side, rows in (("src", lines), ("trg", [line[::-1] for line in lines])):
            text = "".join(" ".join(row) + "\n" for row in rows)
            (folder / f"{name}.{side}").write_text(text.upper() if side == "trg" else text)


def fingerprints(folder: ModelFolder) -> dict[str, str]:
    """Returns the checksums of all files that a kill must not change, by name."""
    files = [*folder.path.rglob("*.safetensors"), *folder.path.glob("hypotheses.*")]
    contents = {str(path.relative_to(folder.path)): path.read_bytes() for path in sorted(files)}
    rows = [line.split("\t") for line in folder.metrics.read_text().splitlines()]
    kept = [index for index, column in enumerate(rows[0]) if column not in TIMES]
    text = "\n".join("\t".join(row[index] for index in kept) for row in rows)
    contents["metrics.tsv without times"] = text.encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def wait_for_moment(run: Run, moment: str, stretch: float, draw: random.Random) -> bool:
    """Waits until a run comes to a moment; returns False if it ends first."""
    count = run.kind.processes

    def meets() -> bool:
        ranks = run.ranks()
        return len(ranks) == count and connections_to(port_of(ranks[0])) > 1

    if moment == "start of Python":
        return run.wait_until(lambda: len(run.ranks()) == count)
    if moment == "import of torch":
        reached = run.wait_until(lambda: any(map(imports_torch, run.ranks().values())))
        time.sleep(draw.uniform(0.0, 1.0))
        return reached
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
    """Starts a run, kills it and finishes it; returns None if it ended before the moment of the kill.

    Returns the kind of the run, who was killed and when, the seconds until no process was left (nan if the run was
    started again, inf if a process stayed), the error lines, and whether the files equal those of the undisturbed run.
    """
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
    lines = said.count("econmt: error: ")
    kill: Kill = {"kind": kind.name, "victim": victim, "moment": moment + how, "ended": ended, "lines": lines}
    return kill | {"same": same}


def prepare_kind(work: Path, number: int, kind: Kind, updates: int) -> tuple[Path, ModelFolder, float]:
    """Trains a kind of run undisturbed; returns its recipe, its folder and the seconds of training."""
    recipe, begun = work / f"{number}.yaml", work / f"{number}.begun"
    recipe.write_text(kind.recipe.format(text=work, output=begun, updates=updates))
    if "parallel.pipeline=2" in kind.options:  # its division is measured once, when the run begins
        Run(recipe, ModelFolder(begun), kind, "training.max_updates=3").finish()
    undisturbed = new_folder(work, number, "whole")
    run = Run(recipe, undisturbed, kind)
    before = len(undisturbed.commits())
    run.wait_until(lambda: len(undisturbed.commits()) > before)
    began = time.monotonic()
    run.finish()
    return recipe, undisturbed, time.monotonic() - began


def new_folder(work: Path, number: int, name: str) -> ModelFolder:
    """Makes the folder of a run, with the start that all runs of its kind share."""
    begun, folder = work / f"{number}.begun", work / f"{number}.{name}"
    if begun.exists():
        shutil.copytree(begun, folder)
    return ModelFolder(folder)


def show(kills: Sequence[Kill]) -> bool:
    """Prints the table; returns True if nothing was lost and no process stayed."""
    rows: list[Row] = []
    for kind in dict.fromkeys(kill["kind"] for kill in kills):
        of_kind = [kill for kill in kills if kill["kind"] == kind]
        alone = [kill["ended"] for kill in of_kind if not math.isnan(kill["ended"])]
        ranks = [kill["lines"] == 1 for kill in of_kind if kill["victim"] == "rank"]
        row: Row = {"run": kind, "kills": len(of_kind), "same bits": sum(kill["same"] for kill in of_kind)}
        row["no process left"] = sum(kill["ended"] != math.inf for kill in of_kind)
        row["seconds until then, at most"] = max(alone) if alone else "-"
        row["one error line"] = f"{sum(ranks)} of {len(ranks)}" if ranks else "-"
        rows.append(row)
    print_rows(rows, "kills")
    moments = Counter(kill["moment"] for kill in kills)
    print(", ".join(f"{moment}: {count}" for moment, count in sorted(moments.items())))
    good = all(
        k["same"] and k["ended"] != math.inf and (k["victim"] != "rank" or k["lines"] == 1) for k in kills
    )
    print(f"{len(kills)} kills: {'nothing was lost' if good else 'SOMETHING IS WRONG'}")
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60, help="number of kills (default: 60)")
    parser.add_argument("--updates", type=int, default=24, help="updates of a run (default: 24)")
    parser.add_argument("--seed", type=int, default=1, help="seed of victims and moments (default: 1)")
    parser.add_argument("--kinds", nargs="+", default=[""], help="beginnings of names (default: all)")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if kind.name.startswith(tuple(options.kinds))]
    if not kinds:
        parser.error(f"--kinds: give beginnings of {'; '.join(kind.name for kind in KINDS)}")
    draw = random.Random(options.seed)
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_text(work)
        made = [prepare_kind(work, number, kind, options.updates) for number, kind in enumerate(kinds)]
        expected = [fingerprints(undisturbed) for _, undisturbed, _ in made]
        tries = 0
        while len(kills) < options.kills:
            number = len(kills) % len(kinds)
            recipe, _, trained = made[number]
            tries += 1
            folder = new_folder(work, number, str(tries))
            kill = kill_once(recipe, folder, kinds[number], expected[number], 0.7 * trained, draw)
            if kill is not None:
                kills.append(kill)
                print(
                    "{0:3} {kind}: {victim}, {moment}: {ended:.2f} s".format(len(kills), **kill), flush=True
                )
            shutil.rmtree(folder.path, ignore_errors=True)
    return 0 if show(kills) else 1


if __name__ == "__main__":
    sys.exit(main())
