"""Compares training and translation with other toolkits.

Measures target tokens a second and peak resident memory of training, and seconds to translate 200 sentences, with
matched models on the same token files. On the CPU the toolkits train in turns of a few seconds, so that all meet the
same conditions; on a GPU (--device cuda) one after the other. README.md beside this file describes the matching.

    python -m scripts.bench compare.run --data-dir corpora --threads 2 --output compare.json
    python -m scripts.bench compare.run --only econmt plain --seconds 20 --turn 2
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from scripts.bench.arguments import parser_of

from .make_data import make_data
from .measure import FailedError, Finished, available_bytes
from .report import Row, machine, markdown, set_ratios, write_csv
from .toolkit import Command, Places, Toolkit, install
from .tools import TOOLKITS
from .tools.econmt import Econmt
from .turns import Trainee, run_alone, train_in_turns

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "econmt-compare"
ENDLESS = 100_000
"""Number of updates of a run that is stopped from outside."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=TOOLKITS, metavar="NAME", help=f"of {', '.join(TOOLKITS)}")
    add("--seconds", type=float, default=25.0, help="of training measured, a round (25)")
    add("--turn", type=float, default=3.0, help="seconds that one trains at a time (3)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: each alone on the GPU, in turn (cpu)")
    add("--one-by-one", action="store_true", help="train each round's seconds at a stretch, without turns")
    add("--rounds", type=int, default=1, help="of all toolkits; medians are shown (1)")
    add("--translations", type=int, default=3, help="a round; medians are shown (3)")
    add("--warm-up", type=int, default=20, help="updates before the clock starts (20)")
    add("--checkpoint-updates", type=int, default=200, help="of the models that translate (200)")
    add("--threads", type=int, default=2, help="OMP_NUM_THREADS of every toolkit (2)")
    add("--data-dir", type=Path, help="folder with multi30k/")
    add("--test-source", type=Path, metavar="FILE", help="text in en to translate (200 captions of the test)")
    add("--work", type=Path, default=CACHE / "work", help="token files, models, logs")
    add("--environments", type=Path, default=CACHE / "environments", help="one a toolkit")
    add("--python", nargs="+", default=[], metavar="VERSION=PATH", help="interpreters, 3.6=/opt/python3.6")
    add("--prepare-only", action="store_true", help="environments, token files, models; no figures")
    add("--again", action="store_true", help="train the models that translate anew")
    add("--output", type=Path, help="JSON file of all readings; the table goes beside it as .csv")
    options = parser.parse_args(words)
    # A process that is stopped keeps its part of a GPU's memory, and the others would meet it.
    options.one_by_one |= options.device == "cuda"
    if options.test_source is not None:
        # Token files and models are kept, and those of one text must not be taken for another's.
        options.work /= f"to-{options.test_source.name.split('.')[0]}"
    return options


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
        self.toolkit = toolkit
        self.sentences = sentences
        self.options = options
        self.row = Row(
            toolkit.name,
            toolkit.version(),
            toolkit.differs,
            peer=toolkit.package != "econmt",
            precision=toolkit.precision,
        )
        self.known_bytes = 0
        self.toolkit.device = options.device
        work = (options.work / (key if options.device == "cpu" else f"{key}-cuda")).resolve()
        self.places = Places((options.work / "data").resolve(), work, Path(sys.executable))
        self.model = work / "model"
        self.environment = environment_of(toolkit, options.threads)

    def prepare(self, interpreters: Mapping[str, str]) -> None:
        """Makes environment, configurations and the model that translates, unless they exist."""
        toolkit, work = self.toolkit, self.places.work
        if toolkit.device not in toolkit.devices:
            raise FailedError(f"{toolkit.name} as it is installed here does not run on {toolkit.device}")
        if toolkit.requirements is not None:
            environments = self.options.environments.resolve()
            interpreter = install(toolkit, environments, interpreters.get(toolkit.python))
            self.places = self.places._replace(interpreter=interpreter)
        updates = self.options.checkpoint_updates
        mark = work / "model.json"
        known = json.loads(mark.read_text(encoding="utf-8")) if mark.is_file() else {}
        same = known.get("version") == toolkit.version()
        # A model of another commit of econmt translates as well; its training says nothing of this commit's memory.
        usable = known.get("updates") == updates and (same or toolkit.requirements is None)
        if usable and not self.options.again:
            self.known_bytes = known["peak_bytes"]
            if same:
                self.row.peaks.append(known["peak_bytes"])
            return
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for number, command in enumerate(toolkit.prepare(self.places)):
            self._run(self._process(command), f"prepare{number}")
        command = toolkit.train(self.places, self.model, updates)
        finished = self._run(self._process(command, train=True), "checkpoint")
        self.known_bytes = finished.peak_bytes
        self.row.peaks.append(finished.peak_bytes)
        made = {"version": toolkit.version(), "updates": updates, "peak_bytes": finished.peak_bytes}
        mark.write_text(json.dumps(made) + "\n", encoding="utf-8")

    def trainee(self) -> Trainee:
        """Returns its training process, which takes turns with others or runs alone."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        return self._process(self.toolkit.train(self.places, self._scratch, ENDLESS), train=True)

    def train(self) -> None:
        """Trains one round without turns."""
        self.trained(self._run(self.trainee(), "train", self.options.seconds))

    def trained(self, finished: Finished | FailedError) -> None:
        """Takes the result of a round of training; raises FailedError if it failed."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        finished = self._logged(finished, "train")
        assert finished.window is not None
        self.row.windows.append(finished.window)
        self.row.peaks.append(finished.peak_bytes)
        say(f"{self.toolkit.name}: {finished.window.tokens_per_second:,.0f} target tokens/s")
        if finished.marks:
            self.row.courses.append(list(finished.marks))

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
        training = (self.toolkit.reading, self.options.warm_up) if train else ()
        return Trainee(command.words, self.environment, work, *training, standard_input=given)

    def _run(self, process: Trainee, what: str, window: float = math.inf) -> Finished:
        finished: Finished | FailedError
        try:
            finished = run_alone(process, window)
        except FailedError as error:
            finished = error
        finished = self._logged(finished, what)
        say(f"{self.toolkit.name}: {what}, {process.clock.read():.0f} s")
        return finished

    def _logged(self, finished: Finished | FailedError, what: str) -> Finished:
        log = self.places.work / f"{what}.log"
        if isinstance(finished, FailedError):
            log.write_text(f"{finished}\n", encoding="utf-8")
            raise finished
        log.write_text("".join(f"{line}\n" for line in finished.lines), encoding="utf-8")
        if what in ("checkpoint", "train") and finished.window is None:
            raise FailedError(f"no line of {log} tells the speed of training")
        return finished


def attempt(runner: Runner, step: Callable[[], None]) -> None:
    """Runs a step of a toolkit that has not failed; an error becomes its row's failure, and the others go on."""
    if runner.row.failure is not None:
        return
    try:
        step()
    except FailedError as error:
        runner.row.failure = last_line(error)
        say(f"{runner.toolkit.name} failed: {error}")


def measure_round(runners: Mapping[str, Runner], options: argparse.Namespace) -> None:
    """Runs one round: training, in turns or one by one, and then translations."""
    if options.one_by_one:
        for runner in runners.values():
            attempt(runner, runner.train)
    else:
        began = time.monotonic()
        trainees = {key: runner.trainee() for key, runner in runners.items() if runner.row.failure is None}
        finished = train_in_turns(trainees, options.seconds, options.turn)
        say(f"{len(trainees)} trained in turns, {time.monotonic() - began:.0f} s")
        for key, outcome in finished.items():
            attempt(runners[key], functools.partial(runners[key].trained, outcome))
    for _ in range(options.translations):
        for runner in runners.values():
            attempt(runner, runner.translate)


def too_large(runners: Iterable[Runner], available: int | None) -> str | None:
    """Returns why the toolkits do not fit into memory together, by their earlier peaks; None if they do."""
    needed = sum(runner.known_bytes for runner in runners if runner.row.failure is None)
    if available is None or needed <= available:
        return None
    return f"together they take {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free: they train one by one"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def last_line(error: Exception) -> str:
    """Returns the last line of an error, which tells the cause."""
    return str(error).strip().splitlines()[-1].strip()


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is ended too
    interpreters = dict(pair.split("=", 1) for pair in options.python)
    if options.data_dir is not None:
        os.environ["ECONMT_DATA"] = str(options.data_dir.resolve())
    counts = make_data(options.work / "data", options.data_dir, options.test_source)
    keys = options.only or [key for key, toolkit in TOOLKITS.items() if options.device in toolkit.devices]
    runners = {key: Runner(key, TOOLKITS[key](), options, counts["test_pairs"]) for key in keys}
    about = machine() | {"commit": Econmt().version(), "data": counts}
    about |= {"threads": options.threads, "device": options.device}
    for runner in runners.values():
        attempt(runner, functools.partial(runner.prepare, interpreters))
    if not options.prepare_only:
        reason = None if options.one_by_one else too_large(runners.values(), available_bytes())
        if reason is not None:
            say(reason)
            options.one_by_one = True
        for _ in range(options.rounds):
            measure_round(runners, options)
    rows = [runner.row for runner in runners.values()]
    if not options.prepare_only:
        set_ratios(rows)
        manner = "one by one" if options.one_by_one else f"in turns of {options.turn:g} s"
        rounds = f"{options.rounds} round{'s' * (options.rounds != 1)}"
        print(markdown(rows, about, f"{rounds} of {options.seconds:.0f} s, {manner}, {options.device}"))
        if options.output is not None:
            turn = None if options.one_by_one else options.turn
            readings = {"about": {**about, "turn_seconds": turn}, "rows": [row.as_dict() for row in rows]}
            options.output.write_text(json.dumps(readings, indent=1) + "\n", encoding="utf-8")
            write_csv(options.output.with_suffix(".csv"), rows)
    return int(any(row.failure is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
