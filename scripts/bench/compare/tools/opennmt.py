"""OpenNMT-py 3.5."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ..measure import Reading
from ..toolkit import (
    ATTENTION,
    BATCH,
    BEAM,
    CLIP_NORM,
    EMBEDDING,
    HIDDEN,
    LEARNING_RATE,
    LOG_EVERY,
    LONGEST_OUTPUT,
    SOURCE,
    TARGET,
    TRUSTED_MODELS,
    Command,
    Places,
    Toolkit,
)

_TRAIN = re.compile(r"Step\s+(\d+)/\s*\d+;.* bsz:\s*\d+/\s*(\d+)/\s*\d+;")
_TRANSLATED = re.compile(r"Total translation time \(s\): ([\d.]+)")
POOL = 29_000
"""Sentences sorted by length at a time: the whole text, where the default would hold it nine times over."""


class OpenNMT(Toolkit):
    """Its YAML file names everything that trains; translation has options."""

    name = "OpenNMT-py"
    package = "OpenNMT-py"
    differs = "sorts by length within a pool; asks for torch < 2.3 but runs on this one"

    def variables(self) -> dict[str, str]:
        """See :data:`TRUSTED_MODELS`."""
        return TRUSTED_MODELS

    def prepare(self, places: Places) -> list[Command]:  # noqa: ARG002
        """Nothing: it reads the token files."""
        return []

    def _config(self, places: Places, model: Path, updates: int) -> Path:
        assert ATTENTION == HIDDEN, "OpenNMT-py's attention has the decoder's size"
        config: dict[str, Any] = {
            "data": {
                "corpus_1": {
                    "path_src": str(places.tokens("train", SOURCE)),
                    "path_tgt": str(places.tokens("train", TARGET)),
                }
            },
            "src_vocab": str(places.data / f"vocabulary.{SOURCE}.opennmt.txt"),
            "tgt_vocab": str(places.data / f"vocabulary.{TARGET}.opennmt.txt"),
            "save_model": str(model / "model"),
            "save_checkpoint_steps": updates,
            "keep_checkpoint": 1,
            "train_steps": updates,
            "valid_steps": 10 * updates,
            "report_every": LOG_EVERY,
            "seed": 1,
            "world_size": 1,
            "gpu_ranks": [] if self.device == "cpu" else [0],
            "num_workers": 0,
            "bucket_size": POOL,
            "model_type": "text",
            "encoder_type": "brnn",
            "decoder_type": "rnn",
            "rnn_type": "LSTM",
            "enc_layers": 1,
            "dec_layers": 1,
            "word_vec_size": EMBEDDING,
            "hidden_size": HIDDEN,
            "global_attention": "mlp",
            "input_feed": 1,
            "dropout": [0.0],
            "attention_dropout": [0.0],
            "batch_size": BATCH,
            "batch_type": "sents",
            "batch_size_multiple": 1,
            "optim": "adam",
            "adam_beta2": 0.999,
            "learning_rate": LEARNING_RATE,
            "max_grad_norm": CLIP_NORM,
            "normalization": "tokens",
        }
        path = places.work / f"{model.name}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return path

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """The model is saved at the last update."""
        config = self._config(places, model, updates)
        return Command([str(places.interpreter), "-m", "onmt.bin.train", "-config", str(config)])

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """The newest model of the folder."""
        saved = max(model.glob("model_step_*.pt"), default=model / "model_step.pt")
        options = {
            "-model": saved,
            "-src": places.tokens("test", SOURCE),
            "-output": output,
            "-beam_size": BEAM,
            "-batch_size": BATCH,
            "-batch_type": "sents",
            "-max_length": LONGEST_OUTPUT,
            "-gpu": -1 if self.device == "cpu" else 0,
        }
        words = [str(word) for pair in options.items() for word in pair]
        return Command([str(places.interpreter), "-m", "onmt.bin.translate", *words, "-report_time"])

    def reading(self, line: str) -> Reading | None:
        """The second part of ``bsz`` is the mean of target tokens an update since the last line, a whole number."""
        found = _TRAIN.search(line)
        return Reading(int(found[1]), LOG_EVERY * float(found[2])) if found else None

    def translation_seconds(self, line: str) -> float | None:
        """Its own stopwatch, which reads, searches and writes."""
        found = _TRANSLATED.search(line)
        return float(found[1]) if found else None
