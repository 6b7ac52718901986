"""Sockeye 1.18, the last with recurrent models, on MXNet 1.4."""

from __future__ import annotations

import re
from pathlib import Path

from .. import toolkit as matched
from ..toolkit import Command, Places, Toolkit


class Sockeye(Toolkit):
    """Sockeye, started by a launcher that counts target tokens."""

    name = "Sockeye 1.18"
    devices = ("cpu",)
    package = "sockeye"
    translated = re.compile(r"Processed \d+ lines\. Total time: ([\d.]+),")
    python = "3.6"

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Returns a command that saves a model when validation at the last update finds it better than none."""
        files: list[object] = ["--output", model]
        for side, language in (("source", places.source), ("target", places.target)):
            files += [f"--{side}", places.tokens("train", language)]
            files += [f"--validation-{side}", places.tokens("valid", language)]
            files += [f"--{side}-vocab", places.data / f"vocabulary.{language}.sockeye.json"]
        options = (
            "--encoder rnn --decoder rnn --num-layers 1:1 --rnn-cell-type lstm "
            f"--rnn-num-hidden {matched.HIDDEN} --num-embed {matched.EMBEDDING} --rnn-attention-type mlp "
            f"--rnn-attention-num-hidden {matched.ATTENTION} --batch-type sentence --batch-size {matched.BATCH} "
            f"--optimizer adam --initial-learning-rate {matched.LEARNING_RATE} --gradient-clipping-type norm "
            f"--gradient-clipping-threshold {matched.CLIP_NORM} --max-updates {updates} "
            f"--checkpoint-interval {updates} --decode-and-evaluate 0 --seed 1 --use-cpu --overwrite-output"
        )
        launcher = matched.LAUNCHERS / "start_sockeye.py"
        return Command.python(places, launcher, matched.LOG_EVERY, *files, *options.split())

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """Returns a command that sorts all sentences by length and cuts them into batches."""
        files = "--models", model, "--input", places.tokens("test", places.source), "--output", output
        options = f"--beam-size {matched.BEAM} --batch-size {matched.BATCH} --chunk-size 1000 --use-cpu"
        return Command.python(places, "-m", "sockeye.translate", *files, *options.split())
