"""Compares quality by minute with plain transformers.

Each trains from the store of recipe laws-en-fr, alone on one GPU, for the seconds of the last mark, which count from
the first update on: econmt as a user runs it, with its validations, and the transformers of ``scripts.bench
transformer``, which translate when training is over. What translates has the recipe's beam.

    econmt prepare laws-en-fr --output store
    python -m scripts.bench compare.quality --store store --only econmt --change training.max_buckets=40
    python -m scripts.bench compare.quality --show quality.json --plot quality.png

One whose figures are in the output file is not measured again.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from econmt.bench.rows import Row, circumstances
from econmt.data.batching.store import open_prepared
from scripts.bench.frame import Bench, draw_lines
from scripts.bench.transformer import scores_of

from .measure import DeviceMemoryWatch, FailedError
from .run import CACHE, environment_of, say
from .toolkit import LAUNCHER
from .tools.econmt import Econmt
from .turns import Trainee, run_alone, write_log

RECIPE = "laws-en-fr"
MARKS = (60.0, 120.0, 240.0, 540.0, 1200.0)
START_SECONDS = 30
"""Seconds that econmt, whose own limit counts its start, gets beyond the last mark."""
BEGINS = "first update begins"
"""First words of the line that is printed when training begins."""
_COLUMNS = itemgetter("seconds", "update", "peak_memory_bytes", "target_tokens_per_second", "bleu")
_SIZE = re.compile(r"([\d,]+) parameters")


class Checkpoint(NamedTuple):
    """Model of a moment of training.

    Attributes:
        seconds: Seconds of training from the first update on.
        update: Updates so far.
        allocated_bytes: Largest memory that PyTorch's allocator gave out on the GPU until then.
        tokens_per_second: Target tokens a second of training alone, since the validation or the mark before.
        bleu, chrf: Scores of the validation text; chrf is None if it has not been measured.
    """

    seconds: float
    update: int
    allocated_bytes: int
    tokens_per_second: float
    bleu: float
    chrf: float | None = None


class Recurrent(Econmt):
    """econmt's recipe; it validates and saves as the recipe says, within the same seconds.

    Translations of update U are in the file ``hypotheses.U`` of the model folder, those of the test text in
    ``hypotheses.test``.
    """

    def command(self, model: Path, changes: Sequence[str], marks: Sequence[float]) -> list[str]:
        """Returns the words, after those of Python, that train until the last mark."""
        limit = f"training.max_seconds={round(marks[-1]) + START_SECONDS}"
        return [str(LAUNCHER), "econmt", "train", RECIPE, f"output={model}", limit, *changes]

    def curve(self, lines: Sequence[str], model: Path) -> list[Checkpoint]:
        """Returns all checkpoints, which training has validated."""
        began = next(float(line.split()[3]) for line in lines if line.startswith(BEGINS))
        with (model / "metrics.tsv").open(encoding="utf-8", newline="") as stream:
            return [
                Checkpoint(float(seconds) - began, int(update), int(peak), float(speed), float(score))
                for seconds, update, peak, speed, score in map(
                    _COLUMNS, csv.DictReader(stream, delimiter="\t")
                )
            ]


class PlainTransformer(Recurrent):
    """Transformer of :mod:`scripts.bench.transformer`, which leaves the same files."""

    name = "plain transformer, 4+4 layers of 384"
    size: ClassVar[str] = "econmt"

    def command(self, model: Path, changes: Sequence[str], marks: Sequence[float]) -> list[str]:
        """Returns the words, after those of Python, that train until the last mark."""
        words = ["-m", "scripts.bench", "transformer", RECIPE, str(model), *changes]
        return [*words, "--size", self.size, "--marks", *map(str, marks)]


class PlainTransformerBase(PlainTransformer):
    """Transformer of the base size."""

    name = "plain transformer, base"
    size = "base"


PROGRAMS: dict[str, type[Recurrent]] = {
    "econmt": Recurrent,
    "transformer": PlainTransformer,
    "transformer-base": PlainTransformerBase,
}
"""Programs that are compared, by the names that ``--only`` takes, in the order of the table."""


def measure(program: Recurrent, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains in an empty folder and scores what was translated; returns the figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model, marks = folder / "model", options.marks
    changes = f"data.prepared={options.store.resolve()}", *options.change
    began: list[float] = []

    def reading(line: str) -> None:
        if line.startswith(BEGINS):
            began.append(trainee.clock.read())
        if line.startswith(("mark: ", "checkpoint ", BEGINS)):
            say(f"{program.name}: {line}")

    words = [sys.executable, *program.command(model, changes, marks)]
    trainee = Trainee(words, environment_of(program, options.threads), folder, reading)
    watch = DeviceMemoryWatch()
    with watch:
        finished = write_log(run_alone(trainee), folder / "train.log")
    prepared = open_prepared(options.store)
    curve = program.curve(finished.lines, model)
    checkpoints = {
        mark: each._replace(**scores(model / f"hypotheses.{each.update:05d}", prepared.valid_text.target))
        for mark, each in last_before(curve, marks).items()
    }
    return {
        "name": program.name,
        "version": program.version(),
        "parameters": next(int(m[1].replace(",", "")) for m in map(_SIZE.search, finished.lines) if m),
        "start_seconds": round(began[0], 1),
        "device_bytes": watch.peak,
        "checkpoints": [{"mark": mark, **each._asdict()} for mark, each in checkpoints.items()],
        "curve": [(each.seconds, each.bleu) for each in curve],
        "test": scores(model / "hypotheses.test", prepared.test_text.target),
    }


def last_before(checkpoints: Sequence[Checkpoint], marks: Sequence[float]) -> dict[float, Checkpoint]:
    """Returns the last checkpoint that there was at each mark, or a second after it."""
    before = {mark: [each for each in checkpoints if each.seconds <= mark + 1] for mark in marks}
    return {mark: rows[-1] for mark, rows in before.items() if rows}


def scores(file: Path, references: list[str]) -> dict[str, float]:
    """Returns BLEU and chrF of a file of translations; nothing if there is none."""
    if not file.is_file():
        return {}
    return scores_of(file.read_text(encoding="utf-8").split("\n")[:-1], references)


def rows_of(figures: Mapping[str, Any]) -> Row:
    """Returns a row of the table, with a column of BLEU for each mark."""
    checkpoints = figures["checkpoints"]
    row: Row = {"name": f"{figures['name']} {figures['version']}"}
    row |= {"million parameters": f"{figures['parameters'] / 1e6:.1f}"}
    row |= {f"BLEU at {each['mark'] / 60:.3g} min": f"{each['bleu']:.1f}" for each in checkpoints}
    for each in checkpoints[-1:]:
        row |= {"chrF": each["chrf"] or "-", "target tokens/s": round(each["tokens_per_second"])}
    row |= {f"test {name}": value for name, value in figures["test"].items()}
    allocated = max((checkpoint["allocated_bytes"] for checkpoint in checkpoints), default=0)
    row["GPU memory, MB"] = f"{figures['device_bytes'] / 1e6:,.0f}"
    row["allocated by PyTorch, MB"] = f"{allocated / 1e6:,.0f}"
    return row | {"start-up, s": f"{figures['start_seconds']:.0f}"}


def draw(results: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draws BLEU over the minutes of training."""
    lines = {each["name"]: {seconds / 60: score for seconds, score in each["curve"]} for each in results}
    title, ticks = "Validation text of laws-en-fr, English to French", [mark / 60 for mark in MARKS]
    draw_lines(lines, path, axes=("minutes of training", "BLEU"), title=title, ticks=ticks)


def main(words: Sequence[str] | None = None) -> int:
    bench = Bench(__doc__, device="auto", threads=4)
    add = bench.add_argument
    add("--store", type=Path, help="prepared store of the recipe, from econmt prepare")
    add("--only", nargs="+", choices=PROGRAMS, metavar="NAME", help=f"of {', '.join(PROGRAMS)}")
    add("--marks", nargs="+", type=float, default=list(MARKS), help="seconds of training %(default)s")
    add("--work", type=Path, default=CACHE / "quality", help="models and logs")
    add("--change", type=str.split, default=[], help="changes of the recipe, and options of the transformers")
    add("--output", type=Path, default=Path("quality.json"), help="JSON file of all figures")
    add("--show", nargs="+", type=Path, metavar="FILE", help="print the table of files; measures nothing")
    add("--plot", type=Path, help="picture to write, with --show")
    options = bench.begin(words)
    if (options.store is None) == (options.show is None):
        bench.error("give --store, to measure, or --show")
    if options.show is not None:
        shown = [each for path in options.show for each in json.loads(path.read_text("utf-8")).values()]
        bench.report(map(rows_of, shown))
        if options.plot is not None:
            draw(shown, options.plot)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is ended too
    known = options.output.read_text(encoding="utf-8") if options.output.is_file() else "{}"
    results, failed = json.loads(known), False
    for key in options.only or list(PROGRAMS):
        if key in results:
            say(f"{key}: measured before")
            continue
        program = PROGRAMS[key]()
        program.device = options.device.type
        try:
            measured = measure(program, options, (options.work / f"{key}-{program.device}").resolve())
        except FailedError as error:
            failed = True
            say(f"{key} failed: {error}")
            continue
        results[key] = measured | {"conditions": circumstances(options.device)}
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    bench.report(map(rows_of, results.values()))
    return int(failed)
