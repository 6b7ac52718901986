"""Compares BLEU by minute of training with other toolkits.

Each toolkit trains on the text of recipe laws-en-fr, alone on one GPU, for the seconds of the last mark, on the same
pieces and batches of as many tokens, and saves its model at every mark; start-up and saving do not count. Then each
model translates the validation text with beam 5.

    econmt prepare laws-en-fr --output store
    python -m scripts.bench compare.quality --store store --only fairseq-lstm --output fairseq-lstm.json
    python -m scripts.bench compare.quality --show fairseq-lstm.json econmt.json --plot quality.png

A toolkit whose figures are in the output file is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from econmt.bench.rows import Row, circumstances
from econmt.data.batching.store import PreparedData, open_prepared
from econmt.evaluation.metrics import bleu, corpus_score, make_metric
from scripts.bench.frame import Bench, draw_lines

from .make_data import DONE, pieces_of, write_test, write_training
from .measure import DeviceMemoryWatch, FailedError, Finished, Window
from .run import CACHE, environment_of, say
from .toolkit import Places, find_environment
from .tools.by_minute import BEGINS, BY_MINUTE, SOURCE, TARGET, ByMinute, Checkpoint
from .turns import Trainee, run_alone, write_log

MARKS = (60.0, 120.0, 240.0, 540.0)


def make_data(folder: Path, store: Path, *, token_files: bool) -> PreparedData:
    """Writes token files of a store, if wanted, unless they exist; what is translated is the validation text."""
    prepared = open_prepared(store)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "store").symlink_to(store.resolve())
    if token_files and not (folder / DONE).is_file():
        counts = write_training(folder, prepared, (SOURCE, TARGET))
        text = list(zip(prepared.valid_text.source, prepared.valid_text.target, strict=True))
        write_test(folder, prepared.vocabularies.sides, text, (SOURCE, TARGET))
        (folder / DONE).write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    return prepared


class ToolkitRun:
    """One toolkit's run."""

    def __init__(self, key: str, options: argparse.Namespace, prepared: PreparedData) -> None:
        self.toolkit: ByMinute = BY_MINUTE[key]()
        self.toolkit.device, self.toolkit.changes = options.device.type, options.change
        self._options, self._prepared = options, prepared
        work = (options.work / f"{key}-{self.toolkit.device}").resolve()
        interpreter = Path(sys.executable)
        if self.toolkit.requirements is not None and not options.this_environment:
            interpreter = find_environment(self.toolkit, options.environments)
        self._places = Places((options.work / "data").resolve(), work, interpreter, SOURCE, TARGET)
        self._environment = environment_of(self.toolkit, options.threads)

    def measure(self) -> dict[str, Any]:
        """Trains, translates and scores; returns the toolkit's figures."""
        toolkit, places = self.toolkit, self._places
        shutil.rmtree(places.work, ignore_errors=True)
        places.work.mkdir(parents=True)
        for number, command in enumerate(toolkit.prepare(places)):
            self._run(Trainee(command.words, self._environment, places.work), f"prepare{number}")
        finished, start_seconds, device_bytes = self._train()
        checkpoints = toolkit.checkpoints(finished.lines, self._model, self._options.marks)
        workers = len(checkpoints) if toolkit.device == "cuda" else 1
        with ThreadPoolExecutor(max(workers, 1)) as pool:
            checkpoints = list(pool.map(self._scored, checkpoints))
        window = finished.window or Window(0, 0.0, 0.0)  # training may end before two lines of its log
        return {
            "name": toolkit.name,
            "version": self._version(),
            "precision": toolkit.precision if toolkit.device == "cuda" else "float32",
            "parameters": toolkit.parameters(finished.lines),
            "tokens_per_second": round(window.tokens_per_second),
            "tokens_per_update": round(window.tokens_per_second * window.seconds / max(window.updates, 1)),
            "start_seconds": start_seconds,
            "device_bytes": device_bytes,
            "host_bytes": finished.peak_bytes,
            "checkpoints": [checkpoint._asdict() for checkpoint in checkpoints],
            "curve": toolkit.curve(finished.lines, self._model),
            "test": self._scores("test", self._prepared.test_text.target),
        }

    @property
    def _model(self) -> Path:
        return self._places.work / "model"

    def _version(self) -> str:
        if self._options.this_environment and self.toolkit.requirements is not None:
            return importlib.metadata.version(self.toolkit.package)
        return self.toolkit.version()

    def _train(self) -> tuple[Finished, float, int]:
        toolkit, marks = self.toolkit, self._options.marks
        command = toolkit.train_until(self._places, self._model, marks)
        began: list[float] = []
        variables = {"COMPARE_MARKS": ",".join(map(str, marks)), "COMPARE_MARKS_FOLDER": str(self._model)}

        def reading(line: str) -> Any:
            if line.startswith(BEGINS):
                began.append(trainee.clock.read())
            if line.startswith(("mark ", "checkpoint ", BEGINS)):
                say(f"{toolkit.name}: {line}")
            return toolkit.reading(line)

        environment = {**self._environment, **variables}
        trainee = Trainee(command.words, environment, self._places.work, reading, toolkit.log_every)
        if toolkit.device == "cpu":
            return self._run(trainee, "train"), round(began[0], 1), 0
        watch = DeviceMemoryWatch()
        with watch:
            finished = self._run(trainee, "train")
        return finished, round(began[0], 1), watch.peak

    def _scored(self, checkpoint: Checkpoint) -> Checkpoint:
        """Scores the validation text, translated with a checkpoint unless it is; without scores if that fails."""
        references, name = self._prepared.valid_text.target, f"{checkpoint.update:05d}"
        try:
            if not self._hypotheses(name).is_file():
                texts = self._translated(checkpoint)
                self._hypotheses(name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        except FailedError as error:
            say(f"{self.toolkit.name} failed: {error}")
        return checkpoint._replace(**self._scores(name, references))

    def _hypotheses(self, name: str) -> Path:
        return self._model / f"hypotheses.{name}"

    def _scores(self, name: str, references: list[str]) -> dict[str, float]:
        """Returns BLEU and chrF of translations; nothing if there are none."""
        if not self._hypotheses(name).is_file():
            return {}
        texts = self._hypotheses(name).read_text(encoding="utf-8").split("\n")[:-1]
        chrf = corpus_score(make_metric("chrf", [references]), texts)
        return {"bleu": round(bleu(texts, references, "13a").value, 2), "chrf": round(chrf.value, 2)}

    def _translated(self, checkpoint: Checkpoint) -> list[str]:
        name = f"mark-{checkpoint.mark:g}"
        output = self._places.work / f"{name}.pieces.txt"
        command = self.toolkit.translate(self._places, self._model / name, output)
        finished = self._run(Trainee(command.words, self._environment, self._places.work), name)
        vocabulary, references = self._prepared.vocabularies.target, self._prepared.valid_text.target
        lines = self.toolkit.output_lines(finished.lines, output)
        if len(lines) != len(references):
            raise FailedError(f"{name} has {len(lines):,} translations of {len(references):,} sentences")
        return [vocabulary.joined(pieces_of(line)) for line in lines]

    def _run(self, trainee: Trainee, name: str) -> Finished:
        finished = write_log(run_alone(trainee), self._places.work / f"{name}.log")
        say(f"{self.toolkit.name}: {name}, {trainee.clock.read():.0f} s")
        return finished


def rows_of(figures: Mapping[str, Any]) -> Row:
    """Returns a toolkit's row of the table, with a column of BLEU for each of its marks."""
    checkpoints = figures["checkpoints"]
    allocated = max((checkpoint["allocated_bytes"] for checkpoint in checkpoints), default=0)
    row: Row = {"toolkit": f"{figures['name']} {figures['version']}", "precision": figures["precision"]}
    row |= {"million parameters": f"{figures['parameters'] / 1e6:.1f}"}
    row |= {
        "target tokens/s": figures["tokens_per_second"],
        "tokens of a batch": figures["tokens_per_update"],
    }
    for each in checkpoints:
        score = "-" if each["bleu"] is None else f"{each['bleu']:.1f}"
        row[f"BLEU at {each['mark'] / 60:.3g} min"] = score
    if checkpoints and checkpoints[-1].get("chrf") is not None:
        row["chrF"] = checkpoints[-1]["chrf"]
    row |= {f"test {name}": value for name, value in figures.get("test", {}).items()}
    row["GPU memory, MB"] = f"{figures['device_bytes'] / 1e6:,.0f}"
    row["allocated by PyTorch, MB"] = f"{allocated / 1e6:,.0f}"
    return row | {"start-up, s": f"{figures['start_seconds']:.0f}"}


def draw(results: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draws BLEU over the minutes of training."""
    lines: dict[str, dict[float, float]] = {}
    for each in results:
        scored = [(it["seconds"], it["bleu"]) for it in each["checkpoints"] if it["bleu"] is not None]
        lines[each["name"]] = {seconds / 60: score for seconds, score in each["curve"] or scored}
    title = "Validation text of laws-en-fr, English to French"
    draw_lines(lines, path, axes=("minutes of training", "BLEU"), title=title)


def main(words: Sequence[str] | None = None) -> int:
    bench = Bench(__doc__, device="auto", threads=4)
    add = bench.add_argument
    add("--store", type=Path, help="prepared store of the recipe, from econmt prepare")
    add("--only", nargs="+", choices=BY_MINUTE, metavar="NAME", help=f"of {', '.join(BY_MINUTE)}")
    add("--marks", nargs="+", type=float, default=list(MARKS), help="seconds of training (60 120 240 540)")
    add("--work", type=Path, default=CACHE / "quality", help="token files, models, logs")
    add("--environments", type=Path, default=CACHE / "environments", help="one a toolkit")
    add("--this-environment", action="store_true", help="run every toolkit with this process's Python")
    add(
        "--change",
        type=str.split,
        default=[],
        help="changes of the recipe and options, for econmt and transformers",
    )
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
    results: dict[str, Any] = {}
    if options.output.is_file():
        results = json.loads(options.output.read_text(encoding="utf-8"))
    keys = options.only or list(BY_MINUTE)
    token_files = not all(BY_MINUTE[key].reads_store for key in keys)
    prepared = make_data(options.work / "data", options.store, token_files=token_files)
    failed = False
    for key in keys:
        if key in results:
            say(f"{key}: measured before")
            continue
        try:
            measured = ToolkitRun(key, options, prepared).measure()
        except FailedError as error:
            failed = True
            say(f"{key} failed: {error}")
            continue
        results[key] = measured | {"conditions": circumstances(options.device)}
        failed |= any(checkpoint["bleu"] is None for checkpoint in measured["checkpoints"])
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    bench.report(map(rows_of, results.values()))
    return int(failed)
