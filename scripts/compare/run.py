"""Trains and translates with several toolkits side by side and prints one table.

Target tokens a second of training, peak resident memory of training, and seconds to translate 200 sentences, on the
same token files, with matched models, on the CPU. README.md beside this file says how each was matched and what
differs. Examples:

python -m scripts.compare.run --data-dir corpora --threads 2 --output compare.json
python -m scripts.compare.run --only econmt plain --seconds 20 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .make_data import TEST_SENTENCES, make_data
from .measure import FailedError, Finished, run
from .report import Row, machine, markdown, write_csv
from .toolkit import ROOT, Command, Places, Toolkit, install
from .tools import TOOLKITS

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "econmt-compare"
ENDLESS = 100_000
"""Updates asked for where a run is stopped from outside."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="compare"
    )
    parser.add_argument(
        "--only", nargs="+", choices=TOOLKITS, metavar="NAME", help=f"of {', '.join(TOOLKITS)}"
    )
    parser.add_argument("--seconds", type=float, default=25.0, help="of training measured, a round (25)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of all toolkits in turn; medians are shown (2)"
    )
    parser.add_argument("--warm-up", type=int, default=20, help="updates before the clock starts (20)")
    parser.add_argument(
        "--checkpoint-updates", type=int, default=200, help="of the models that translate (200)"
    )
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of every toolkit (2)")
    parser.add_argument("--data-dir", type=Path, help="folder with multi30k/")
    parser.add_argument("--work", type=Path, default=CACHE / "work", help="token files, models, logs")
    parser.add_argument("--environments", type=Path, default=CACHE / "environments", help="one a toolkit")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="VERSION=PATH",
        help="interpreters, such as 3.6=/opt/python3.6",
    )
    parser.add_argument(
        "--prepare-only", action="store_true", help="environments, token files, models; no figures"
    )
    parser.add_argument("--again", action="store_true", help="train the models that translate anew")
    parser.add_argument(
        "--output", type=Path, help="JSON file of all readings; the table goes beside it as .csv"
    )
    return parser.parse_args(words)


class Runner:
    """One toolkit's part of the comparison."""

    def __init__(self, key: str, toolkit: Toolkit, options: argparse.Namespace) -> None:
        self.toolkit = toolkit
        self.options = options
        self.row = Row(toolkit.name, toolkit.version(), toolkit.differs)
        work = (options.work / key).resolve()
        self.places = Places((options.work / "data").resolve(), work, Path(sys.executable))
        self.model = work / "model"
        self.environment = {
            "OMP_NUM_THREADS": str(options.threads),
            "MKL_NUM_THREADS": str(options.threads),
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **toolkit.variables(),
        }

    def prepare(self, interpreters: Mapping[str, str]) -> None:
        """Environment, configurations, and the model that translates; what is there already is kept."""
        toolkit, work = self.toolkit, self.places.work
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
            if same:
                self.row.peaks.append(known["peak_bytes"])
            return
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for number, command in enumerate(toolkit.prepare(self.places)):
            self._run(command, f"prepare{number}")
        command = toolkit.train(self.places, self.model, updates)
        finished = self._run(command, "checkpoint", warm_up=self.options.warm_up, train=True)
        self.row.peaks.append(finished.peak_bytes)
        made = {"version": toolkit.version(), "updates": updates, "peak_bytes": finished.peak_bytes}
        mark.write_text(json.dumps(made) + "\n", encoding="utf-8")

    def measure(self) -> None:
        """One round: a stretch of training, then the translation."""
        options, row = self.options, self.row
        scratch = self.places.work / "measured"
        shutil.rmtree(scratch, ignore_errors=True)
        command = self.toolkit.train(self.places, scratch, ENDLESS)
        trained = self._run(
            command, "train", warm_up=options.warm_up, window_seconds=options.seconds, train=True
        )
        shutil.rmtree(scratch, ignore_errors=True)
        assert trained.window is not None
        row.windows.append(trained.window)
        row.peaks.append(trained.peak_bytes)
        output = self.places.work / "output.txt"
        output.unlink(missing_ok=True)
        translated = self._run(self.toolkit.translate(self.places, self.model, output), "translate")
        seconds = [self.toolkit.translation_seconds(line) for line in translated.lines]
        lines = self.toolkit.output_lines(translated.lines, output)
        said = [value for value in seconds if value is not None]
        if not said or len(lines) != TEST_SENTENCES:
            raise FailedError(
                f"translation gave {len(lines)} lines for {TEST_SENTENCES} and {len(said)} times; see "
                f"{self.places.work / 'translate.log'}"
            )
        row.translations.append(said[-1])
        row.output_words = sum(len(line.replace("▁", " ").split()) for line in lines)

    def _run(self, command: Command, what: str, *, train: bool = False, **limits: Any) -> Finished:
        began = time.monotonic()
        log = self.places.work / f"{what}.log"
        try:
            finished = run(
                command.words,
                self.environment,
                self.places.work,
                reading=self.toolkit.reading if train else None,
                standard_input=command.standard_input,
                **limits,
            )
        except FailedError as error:
            log.write_text(f"{error}\n", encoding="utf-8")
            raise
        log.write_text("".join(f"{line}\n" for line in finished.lines), encoding="utf-8")
        if train and finished.window is None:
            raise FailedError(f"no line of {log} tells the speed of training")
        say(f"{self.toolkit.name}: {what}, {time.monotonic() - began:.0f} s")
        return finished


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def first_lines(error: Exception) -> str:
    """What failed, in one line: the last line that the toolkit printed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1]


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a toolkit failed."""
    options = arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is running is ended too
    interpreters = dict(pair.split("=", 1) for pair in options.python)
    if options.data_dir is not None:
        os.environ["ECONMT_DATA"] = str(options.data_dir.resolve())
    counts = make_data(options.work / "data", options.data_dir)
    runners = {key: Runner(key, TOOLKITS[key](), options) for key in options.only or TOOLKITS}
    about = {**machine(), "threads": options.threads, "commit": commit(), "data": counts}
    for number in range(-1, 0 if options.prepare_only else options.rounds):
        for runner in runners.values():
            if runner.row.failure is not None:
                continue
            try:
                if number < 0:
                    runner.prepare(interpreters)
                else:
                    runner.measure()
            except FailedError as error:
                runner.row.failure = first_lines(error)
                say(f"{runner.toolkit.name} failed: {error}")
    rows = [runner.row for runner in runners.values()]
    if not options.prepare_only:
        print(markdown(rows, about, options.rounds, options.seconds))
        if options.output is not None:
            readings = {"about": about, "rows": [row.as_dict() for row in rows]}
            options.output.write_text(json.dumps(readings, indent=1) + "\n", encoding="utf-8")
            write_csv(options.output.with_suffix(".csv"), rows)
    return int(any(row.failure is not None for row in rows))


def commit() -> str:
    """This checkout's commit; a plus sign says that files differ from it."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
