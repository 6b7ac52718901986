"""fairseq 0.12.2, architecture ``lstm``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from .. import toolkit as matched
from ..measure import Reading
from ..toolkit import Command, Places, Toolkit

_HYPOTHESIS = re.compile(r"H-(\d+)\t[^\t]*\t(.*)")
_TRAIN = re.compile(r"train_inner .*\bwpb=([\d.]+),.*\bnum_updates=(\d+),")


_TRAINING = (
    f"--arch lstm --encoder-embed-dim {matched.EMBEDDING} --encoder-hidden-size {matched.HIDDEN // 2} "
    f"--encoder-layers 1 --encoder-bidirectional --decoder-embed-dim {matched.EMBEDDING} "
    f"--decoder-hidden-size {matched.HIDDEN} --decoder-out-embed-dim {matched.HIDDEN} --decoder-layers 1 "
    f"--dropout 0.0 --batch-size {matched.BATCH} --required-batch-size-multiple 1 --optimizer adam "
    f"--adam-betas (0.9,0.999) --lr {matched.LEARNING_RATE} --clip-norm {matched.CLIP_NORM} --num-workers 0 "
    f"--no-epoch-checkpoints --log-interval {matched.LOG_EVERY} --log-format simple --disable-validation"
)
"""Options for the model and its training."""


class Fairseq(Toolkit):
    """fairseq, started by a launcher that lets this release run on Python 3.11 and today's torch."""

    name = "fairseq lstm"
    package = "fairseq"
    loads_pickles = True
    translated = re.compile(r"Translated [\d,]+ sentences \([\d,]+ tokens\) in ([\d.]+)s")

    def _command(self, places: Places, program: str, *arguments: object) -> Command:
        flags = ["--cpu"] if self.device == "cpu" and program != "preprocess" else []
        return Command.python(places, matched.LAUNCHER, "fairseq", program, *arguments, *flags)

    def prepare(self, places: Places) -> list[Command]:
        """Returns the command that binarises the token files."""
        options: list[object] = ["--source-lang", matched.SOURCE, "--target-lang", matched.TARGET]
        options += ["--destdir", places.work / "binary", "--workers", os.cpu_count()]
        for split, option in (("train", "--trainpref"), ("valid", "--validpref"), ("test", "--testpref")):
            options += [option, places.data / split]
        for option, side in (("--srcdict", matched.SOURCE), ("--tgtdict", matched.TARGET)):
            options += [option, places.data / f"vocabulary.{side}.fairseq.txt"]
        return [self._command(places, "preprocess", *options)]

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Returns a command that batches sentences of similar length, as fairseq does by default."""
        assert matched.ATTENTION == matched.HIDDEN, "fairseq's attention has the decoder's size"
        options = "--save-dir", model, "--max-update", updates, *_TRAINING.split()
        return self._command(places, "train", places.work / "binary", *options)

    def translate(self, places: Places, model: Path, output: Path) -> Command:  # noqa: ARG002
        """Returns the command that translates the binarised test text."""
        options = (
            f"--gen-subset test --beam {matched.BEAM} --batch-size {matched.BATCH} --max-len-a 2 "
            "--max-len-b 10 --num-workers 0"
        )
        words = places.work / "binary", "--path", model / "checkpoint_last.pt", *options.split()
        return self._command(places, "generate", *words)

    def reading(self, line: str) -> Reading | None:
        """Reads ``wpb``, the mean of target tokens an update since the last line."""
        found = _TRAIN.search(line)
        return Reading(int(found[2]), matched.LOG_EVERY * float(found[1])) if found else None

    def output_lines(self, printed: Sequence[str], output: Path) -> list[str]:  # noqa: ARG002
        """Returns the hypotheses, which are printed as H-NUMBER, score, text, sorted by length."""
        found = filter(None, map(_HYPOTHESIS.fullmatch, printed))
        return [text for _, text in sorted((int(match[1]), match[2]) for match in found)]
