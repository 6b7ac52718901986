"""Compares training and translation with other toolkits.

    python -m scripts.bench compare.run --data-dir corpora --threads 2 --json compare.json
    python -m scripts.bench compare.run --only econmt plain --seconds 20 --turn 2 --processor-time

Measures target tokens a second and peak resident memory of training, and seconds to translate 200 sentences, with
matched models on the same token files, on the CPU. The toolkits train in turns of a few seconds, so that all meet the
same conditions. With --processor-time the seconds of training are those of processors. README.md beside this file
describes the matching.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.frame import Bench

from .make_data import make_data
from .measure import FailedError, Finished, processor_seconds
from .report import Measured, set_ratios
from .toolkit import Command, Places, Toolkit, find_environment
from .tools import TOOLKITS
from .turns import Trainee, run_alone, train_in_turns, write_log

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "econmt-compare"
ENDLESS = 100_000
"""Number of updates of a run that is stopped from outside."""


def environment_of(toolkit: Toolkit, threads: int) -> dict[str, str]:
    """Returns the environment variables of a toolkit's processes, which take ``threads`` threads each."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **({"CUDA_VISIBLE_DEVICES": ""} if toolkit.device == "cpu" else {}),
        **toolkit.variables(),
    }


class Runner:
    """One toolkit's part of the comparison."""

    def __init__(self, key: str, toolkit: Toolkit, options: argparse.Namespace, sentences: int) -> None:
        self.toolkit, self.sentences, self.options = toolkit, sentences, options
        is_peer = toolkit.package != "econmt"
        self.row = Measured(toolkit.name, toolkit.version(), toolkit.precision, is_peer)
        work = (options.work / key).resolve()
        self.places = Places((options.work / "data").resolve(), work, Path(sys.executable))
        self.model = work / "model"
        self.environment = environment_of(toolkit, options.threads)

    def prepare(self) -> None:
        """Makes configurations and the model that translates, unless they exist."""
        toolkit, work = self.toolkit, self.places.work
        if toolkit.requirements is not None:
            interpreter = find_environment(toolkit, self.options.environments)
            self.places = self.places._replace(interpreter=interpreter)
        updates = self.options.checkpoint_updates
        mark = work / "model.json"
        known = json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else {}
        same = known.get("version") == toolkit.version()
        # A model of another commit of econmt translates as well; its training says nothing of this commit's memory.
        if known.get("updates") == updates and (same or toolkit.requirements is None):
            if same:
                self.row.peaks.append(known["peak_bytes"])
            return
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for number, command in enumerate(toolkit.prepare(self.places)):
            self._run(self._process(command), f"prepare{number}")
        command = toolkit.train(self.places, self.model, updates)
        finished = self._run(self._process(command, train=True), "checkpoint")
        self.row.peaks.append(finished.peak_bytes)
        made = {"version": toolkit.version(), "updates": updates, "peak_bytes": finished.peak_bytes}
        mark.write_text(json.dumps(made) + "\n", encoding="utf-8")

    def trainee(self) -> Trainee:
        """Returns its training process, which takes turns with others."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        return self._process(self.toolkit.train(self.places, self._scratch, ENDLESS), train=True)

    def trained(self, finished: Finished | FailedError) -> None:
        """Takes the result of training; raises FailedError if it failed."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        finished = self._logged(finished, "train")
        self.row.window, self.row.course = finished.window, finished.marks
        self.row.peaks.append(finished.peak_bytes)
        say(f"{self.toolkit.name}: {self.row.speed:,.0f} target tokens/s")

    def translate(self) -> None:
        """Translates once."""
        row = self.row
        output = self.places.work / "output.txt"
        output.unlink(missing_ok=True)
        command = self.toolkit.translate(self.places, self.model, output)
        translated = self._run(self._process(command), "translate")
        seconds = [self.toolkit.translation_seconds(line) for line in translated.lines]
        lines = self.toolkit.output_lines(translated.lines, output)
        said = [value for value in seconds if value is not None]
        if not said or len(lines) != self.sentences:
            raise FailedError(
                f"translation gave {len(lines)} lines for {self.sentences} and {len(said)} times; see "
                f"{self.places.work / 'translate.log'}"
            )
        row.translations.append(said[-1])
        row.output_words = sum(len(line.replace("▁", " ").split()) for line in lines)
        say(f"{self.toolkit.name}: {len(lines):,} sentences in {said[-1]:.2f} s, {row.output_words:,} words")

    @property
    def _scratch(self) -> Path:
        return self.places.work / "measured"

    def _process(self, command: Command, *, train: bool = False) -> Trainee:
        work, given = self.places.work, command.standard_input
        training: dict[str, Any] = {}
        if train:
            training = {"reading": self.toolkit.reading, "warm_up": self.options.warm_up}
            if self.options.processor_time:
                training["clock"] = processor_seconds
        return Trainee(command.words, self.environment, work, standard_input=given, **training)

    def _run(self, process: Trainee, what: str) -> Finished:
        finished = self._logged(run_alone(process), what)
        say(f"{self.toolkit.name}: {what}, {process.clock.read():.0f} s")
        return finished

    def _logged(self, finished: Finished | FailedError, what: str) -> Finished:
        log = self.places.work / f"{what}.log"
        done = write_log(finished, log)
        if what in ("checkpoint", "train") and done.window is None:
            raise FailedError(f"no line of {log} tells the speed of training")
        return done


def attempt(runner: Runner, step: Callable[[], None]) -> None:
    """Runs a step of a toolkit that has not failed; an error becomes its row's failure, and the others go on."""
    if runner.row.failure is not None:
        return
    try:
        step()
    except FailedError as error:
        runner.row.failure = str(error).strip().splitlines()[-1].strip()  # which tells the cause
        say(f"{runner.toolkit.name} failed: {error}")


def measure(runners: Mapping[str, Runner], options: argparse.Namespace) -> None:
    """Trains in turns, and then translates."""
    began = time.monotonic()
    trainees = {key: runner.trainee() for key, runner in runners.items() if runner.row.failure is None}
    finished = train_in_turns(trainees, options.seconds, options.turn)
    say(f"{len(trainees)} trained in turns, {time.monotonic() - began:.0f} s")
    for key, outcome in finished.items():
        attempt(runners[key], functools.partial(runners[key].trained, outcome))
    for _ in range(options.translations):
        for runner in runners.values():
            attempt(runner, runner.translate)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    bench = Bench(__doc__, seconds=25.0, threads=2)
    add = bench.add_argument
    add("--only", nargs="+", choices=TOOLKITS, metavar="NAME", help=f"of {', '.join(TOOLKITS)}")
    add("--turn", type=float, default=3.0, help="seconds that one trains at a time (3)")
    add("--processor-time", action="store_true", help="count seconds of processors, for a shared machine")
    add("--translations", type=int, default=3, help="of each; the median is shown (3)")
    add("--warm-up", type=int, default=20, help="updates before the clock starts (20)")
    add("--checkpoint-updates", type=int, default=200, help="of the models that translate (200)")
    add("--data-dir", type=Path, help="folder with multi30k/")
    add("--work", type=Path, default=CACHE / "work", help="token files, models, logs")
    add("--environments", type=Path, default=CACHE / "environments", help="one a toolkit")
    add("--prepare-only", action="store_true", help="token files and models; no figures")
    options = bench.begin(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is ended too
    if options.data_dir is not None:
        os.environ["ECONMT_DATA"] = str(options.data_dir.resolve())
    counts = make_data(options.work / "data", options.data_dir)
    keys = options.only or list(TOOLKITS)
    runners = {key: Runner(key, TOOLKITS[key](), options, counts["test_pairs"]) for key in keys}
    load = os.getloadavg()[0]
    for runner in runners.values():
        attempt(runner, runner.prepare)
    rows = [runner.row for runner in runners.values()]
    if not options.prepare_only:
        measure(runners, options)
        set_ratios(rows)
        manner = f"{options.seconds:.0f} s, in turns of {options.turn:g} s"
        bench.print_header(f"{os.cpu_count()} cores, load {load:.1f} before", manner)
        bench.report((row.row() for row in rows), f"{counts['test_pairs']:,} sentences are translated")
    return int(any(row.failure is not None for row in rows))
