"""Sockeye 1.18, the last with recurrent models, on MXNet 1.4."""

from __future__ import annotations

import re
from pathlib import Path

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
    Command,
    Places,
    Toolkit,
)

_TRANSLATED = re.compile(r"Processed \d+ lines\. Total time: ([\d.]+),")


class Sockeye(Toolkit):
    """Training runs through a launcher that counts target tokens; see there."""

    name = "Sockeye 1.18"
    devices = ("cpu",)
    package = "sockeye"
    python = "3.6"
    differs = "another framework, MXNet 1.4 with MKL-DNN; buckets are 10 wide; asks for Python 3.6"

    def prepare(self, places: Places) -> list[Command]:  # noqa: ARG002
        """Nothing: it reads the token files."""
        return []

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """The model is saved when validation, at the last update, finds it better than none."""
        options = {
            "--source": places.tokens("train", SOURCE),
            "--target": places.tokens("train", TARGET),
            "--validation-source": places.tokens("valid", SOURCE),
            "--validation-target": places.tokens("valid", TARGET),
            "--source-vocab": places.data / f"vocabulary.{SOURCE}.sockeye.json",
            "--target-vocab": places.data / f"vocabulary.{TARGET}.sockeye.json",
            "--output": model,
            "--encoder": "rnn",
            "--decoder": "rnn",
            "--num-layers": "1:1",
            "--rnn-cell-type": "lstm",
            "--rnn-num-hidden": HIDDEN,
            "--num-embed": EMBEDDING,
            "--rnn-attention-type": "mlp",
            "--rnn-attention-num-hidden": ATTENTION,
            "--batch-type": "sentence",
            "--batch-size": BATCH,
            "--optimizer": "adam",
            "--initial-learning-rate": LEARNING_RATE,
            "--gradient-clipping-type": "norm",
            "--gradient-clipping-threshold": CLIP_NORM,
            "--max-updates": updates,
            "--checkpoint-interval": updates,
            "--decode-and-evaluate": 0,
            "--seed": 1,
        }
        words = [str(word) for pair in options.items() for word in pair]
        launcher = str(LAUNCHERS / "start_sockeye.py")
        return Command(
            [str(places.interpreter), launcher, str(LOG_EVERY), *words, "--use-cpu", "--overwrite-output"]
        )

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """All sentences are one chunk, sorted by length and cut into batches."""
        options = {
            "--models": model,
            "--input": places.tokens("test", SOURCE),
            "--output": output,
            "--beam-size": BEAM,
            "--batch-size": BATCH,
            "--chunk-size": 1000,
        }
        words = [str(word) for pair in options.items() for word in pair]
        return Command([str(places.interpreter), "-m", "sockeye.translate", *words, "--use-cpu"])

    def translation_seconds(self, line: str) -> float | None:
        """Its own stopwatch, which reads, searches and writes."""
        found = _TRANSLATED.search(line)
        return float(found[1]) if found else None
