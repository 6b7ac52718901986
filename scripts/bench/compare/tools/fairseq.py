"""fairseq 0.12.2, architecture ``lstm``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..measure import Reading
from ..toolkit import (
    ATTENTION,
    BATCH,
    BEAM,
    CLIP_NORM,
    EMBEDDING,
    HIDDEN,
    LAUNCHERS,
    LEARNING_RATE,
    LOG_EVERY,
    SOURCE,
    TARGET,
    TRUSTED_MODELS,
    Command,
    Places,
    Toolkit,
)

_TRAIN = re.compile(r"train_inner .*\bwpb=([\d.]+),.*\bnum_updates=(\d+),")
_TRANSLATED = re.compile(r"Translated [\d,]+ sentences \([\d,]+ tokens\) in ([\d.]+)s")


class Fairseq(Toolkit):
    """Runs through a launcher that lets the release of 2022 start on Python 3.11 and today's torch."""

    name = "fairseq lstm"
    package = "fairseq"
    build_first = ("numpy", "cython", "setuptools", "wheel")
    build_without_isolation = "fairseq==0.12.2"
    differs = "attention is bilinear, which is cheaper: no tanh over source x target x 512"

    def variables(self) -> dict[str, str]:
        """See :data:`TRUSTED_MODELS`."""
        return TRUSTED_MODELS

    def _command(self, places: Places, program: str, *arguments: str) -> Command:
        launcher = str(LAUNCHERS / "start_fairseq.py")
        return Command([str(places.interpreter), launcher, program, *arguments])

    def prepare(self, places: Places) -> list[Command]:
        """Binarise the token files."""
        prefixes = {"train": "--trainpref", "valid": "--validpref", "test": "--testpref"}
        arguments = [
            "--source-lang",
            SOURCE,
            "--target-lang",
            TARGET,
            "--destdir",
            str(places.work / "binary"),
        ]
        for split, option in prefixes.items():
            arguments += [option, str(places.data / split)]
        for option, side in (("--srcdict", SOURCE), ("--tgtdict", TARGET)):
            arguments += [option, str(places.data / f"vocabulary.{side}.fairseq.txt")]
        return [self._command(places, "preprocess", *arguments)]

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Sentences of like length share batches, which fairseq does by itself."""
        assert ATTENTION == HIDDEN, "fairseq's attention has the decoder's size"
        options = {
            "--arch": "lstm",
            "--encoder-embed-dim": EMBEDDING,
            "--encoder-hidden-size": HIDDEN // 2,
            "--encoder-layers": 1,
            "--decoder-embed-dim": EMBEDDING,
            "--decoder-hidden-size": HIDDEN,
            "--decoder-out-embed-dim": HIDDEN,
            "--decoder-layers": 1,
            "--dropout": 0.0,
            "--batch-size": BATCH,
            "--required-batch-size-multiple": 1,
            "--optimizer": "adam",
            "--adam-betas": "(0.9, 0.999)",
            "--lr": LEARNING_RATE,
            "--clip-norm": CLIP_NORM,
            "--max-update": updates,
            "--num-workers": 0,
            "--log-interval": LOG_EVERY,
            "--log-format": "simple",
            "--save-dir": model,
        }
        words = [str(word) for pair in options.items() for word in pair]
        flags = ["--encoder-bidirectional", "--disable-validation", "--no-epoch-checkpoints", *self._where()]
        return self._command(places, "train", str(places.work / "binary"), *words, *flags)

    def translate(self, places: Places, model: Path, output: Path) -> Command:  # noqa: ARG002
        """``fairseq-generate`` reads the binarised test text."""
        options = {
            "--path": model / "checkpoint_last.pt",
            "--gen-subset": "test",
            "--beam": BEAM,
            "--batch-size": BATCH,
            "--max-len-a": 2,
            "--max-len-b": 10,
            "--num-workers": 0,
        }
        words = [str(word) for pair in options.items() for word in pair]
        return self._command(places, "generate", str(places.work / "binary"), *words, *self._where())

    def _where(self) -> list[str]:
        """Without the flag it takes a GPU."""
        return ["--cpu"] if self.device == "cpu" else []

    def reading(self, line: str) -> Reading | None:
        """``wpb`` is the mean of target tokens an update since the last line."""
        found = _TRAIN.search(line)
        return Reading(int(found[2]), LOG_EVERY * float(found[1])) if found else None

    def translation_seconds(self, line: str) -> float | None:
        """Its own stopwatch of the search: reading and batching are not in it."""
        found = _TRANSLATED.search(line)
        return float(found[1]) if found else None

    def output_lines(self, printed: Sequence[str], output: Path) -> list[str]:  # noqa: ARG002
        """Hypotheses are printed as H-NUMBER, score, text."""
        return [line.split("\t", 2)[2] for line in printed if re.match(r"H-\d+\t", line)]
