"""fairseq 0.12.2, architecture ``lstm``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .. import toolkit as matched
from ..measure import Reading
from ..toolkit import Command, Places, Toolkit

_TRAIN = re.compile(r"train_inner .*\bwpb=([\d.]+),.*\bnum_updates=(\d+),")


class Fairseq(Toolkit):
    """fairseq, started by a launcher that lets this release run on Python 3.11 and today's torch."""

    name = "fairseq lstm"
    package = "fairseq"
    loads_pickles = True
    translated = re.compile(r"Translated [\d,]+ sentences \([\d,]+ tokens\) in ([\d.]+)s")
    build_first = ("numpy", "cython", "setuptools", "wheel")
    build_without_isolation = "fairseq==0.12.2"
    differs = "attention is bilinear, which is cheaper: no tanh over source x target x 512"

    def _command(self, places: Places, program: str, *arguments: object) -> Command:
        flags = ["--cpu"] if self.device == "cpu" and program != "preprocess" else []
        return Command.python(places, matched.LAUNCHERS / "start_fairseq.py", program, *arguments, *flags)

    def prepare(self, places: Places) -> list[Command]:
        """Returns the command that binarises the token files."""
        options: list[object] = ["--source-lang", matched.SOURCE, "--target-lang", matched.TARGET]
        options += ["--destdir", places.work / "binary"]
        for split, option in (("train", "--trainpref"), ("valid", "--validpref"), ("test", "--testpref")):
            options += [option, places.data / split]
        for option, side in (("--srcdict", matched.SOURCE), ("--tgtdict", matched.TARGET)):
            options += [option, places.data / f"vocabulary.{side}.fairseq.txt"]
        return [self._command(places, "preprocess", *options)]

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Returns a command that batches sentences of similar length, as fairseq does by default."""
        assert matched.ATTENTION == matched.HIDDEN, "fairseq's attention has the decoder's size"
        width, hidden = matched.EMBEDDING, matched.HIDDEN
        options = (
            f"--arch lstm --encoder-embed-dim {width} --encoder-hidden-size {hidden // 2} --encoder-layers 1 "
            f"--encoder-bidirectional --decoder-embed-dim {width} --decoder-hidden-size {hidden} "
            f"--decoder-out-embed-dim {hidden} --decoder-layers 1 --dropout 0.0 --batch-size {matched.BATCH} "
            "--required-batch-size-multiple 1 --optimizer adam --adam-betas (0.9,0.999) "
            f"--lr {matched.LEARNING_RATE} --clip-norm {matched.CLIP_NORM} --max-update {updates} --num-workers 0 "
            f"--log-interval {matched.LOG_EVERY} --log-format simple --disable-validation --no-epoch-checkpoints"
        )
        return self._command(places, "train", places.work / "binary", "--save-dir", model, *options.split())

    def translate(self, places: Places, model: Path, output: Path) -> Command:  # noqa: ARG002
        """Returns the command that translates the binarised test text."""
        options = (
            f"--gen-subset test --beam {matched.BEAM} --batch-size {matched.BATCH} --max-len-a 2 --max-len-b 10 "
            "--num-workers 0"
        )
        words = places.work / "binary", "--path", model / "checkpoint_last.pt", *options.split()
        return self._command(places, "generate", *words)

    def reading(self, line: str) -> Reading | None:
        """Reads ``wpb``, the mean of target tokens an update since the last line."""
        found = _TRAIN.search(line)
        return Reading(int(found[2]), matched.LOG_EVERY * float(found[1])) if found else None

    def output_lines(self, printed: Sequence[str], output: Path) -> list[str]:  # noqa: ARG002
        """Returns the hypotheses, which are printed as H-NUMBER, score, text."""
        return [line.split("\t", 2)[2] for line in printed if re.match(r"H-\d+\t", line)]
