"""Joey NMT 2.3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..toolkit import (
    BATCH,
    BEAM,
    CLIP_NORM,
    EMBEDDING,
    HIDDEN,
    LAUNCHERS,
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

_TRANSLATED = re.compile(r"Generation took ([\d.]+)\[sec\]")


class JoeyNMT(Toolkit):
    """Its YAML file names everything; one is written for training and one for translation."""

    name = "Joey NMT"
    package = "joeynmt"
    differs = "no buckets: sentences of all lengths share a batch; its attention size is the decoder's"

    def variables(self) -> dict[str, str]:
        """See :data:`TRUSTED_MODELS`."""
        return TRUSTED_MODELS

    def prepare(self, places: Places) -> list[Command]:  # noqa: ARG002
        """Nothing: it reads the token files."""
        return []

    def _config(self, places: Places, model: Path, updates: int) -> Path:
        sides: dict[str, Any] = {
            side: {
                "lang": language,
                "level": "word",
                "voc_file": str(places.data / f"vocabulary.{language}.joeynmt.txt"),
            }
            for side, language in (("src", SOURCE), ("trg", TARGET))
        }
        decoder = {
            "type": "recurrent",
            "rnn_type": "lstm",
            "embeddings": {"embedding_dim": EMBEDDING, "scale": False},
            "hidden_size": HIDDEN,
            "num_layers": 1,
            "dropout": 0.0,
            "hidden_dropout": 0.0,
            "attention": "bahdanau",
            "input_feeding": True,
            "init_hidden": "bridge",
        }
        encoder = {
            "type": "recurrent",
            "rnn_type": "lstm",
            "embeddings": {"embedding_dim": EMBEDDING, "scale": False},
            "hidden_size": HIDDEN // 2,
            "bidirectional": True,
            "num_layers": 1,
            "dropout": 0.0,
        }
        training = {
            "optimizer": "adam",
            "learning_rate": LEARNING_RATE,
            "scheduling": "exponential",  # a release of 2024 cannot make the others on today's torch
            "decrease_factor": 1.0,
            "clip_grad_norm": CLIP_NORM,
            "batch_size": BATCH,
            "batch_type": "sentence",
            "normalization": "tokens",
            "epochs": 1000,
            "updates": updates,
            "logging_freq": LOG_EVERY,
            "validation_freq": updates,
            "keep_best_ckpts": 1,
            "overwrite": True,
            "print_valid_sents": [],
        }
        testing = {
            "load_model": str(model / "best.ckpt"),
            "batch_size": BATCH,
            "batch_type": "sentence",
            "beam_size": BEAM,
            "beam_alpha": 1.0,
            "max_output_length": LONGEST_OUTPUT,
            "eval_metrics": [],
        }
        config = {
            "name": "compare",
            "model_dir": str(model),
            "use_cuda": self.device == "cuda",
            "random_seed": 1,
            "data": {
                "train": str(places.data / "train"),
                "dev": str(places.data / "valid"),
                "dataset_type": "plain",
                **sides,
            },
            "testing": testing,
            "training": training,
            "model": {"encoder": encoder, "decoder": decoder},
        }
        path = places.work / f"{model.name}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return path

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """A model is saved when validation, at the last update, finds it better than none.

        A launcher tells the tokens, see there.
        """
        updates = max(LOG_EVERY, updates // LOG_EVERY * LOG_EVERY)
        config = self._config(places, model, updates)
        launcher = str(LAUNCHERS / "start_joeynmt.py")
        return Command([str(places.interpreter), launcher, "train", str(config), "--skip-test"])

    def translate(self, places: Places, model: Path, output: Path) -> Command:  # noqa: ARG002
        """Pieces come from standard input. Translations are printed: its option for a file fails in 2.3.0."""
        config = str(places.work / f"{model.name}.yaml")
        words = [str(places.interpreter), "-m", "joeynmt", "translate", config]
        return Command(words, places.tokens("test", SOURCE))

    def translation_seconds(self, line: str) -> float | None:
        """Its own stopwatch of the search over all batches."""
        found = _TRANSLATED.search(line)
        return float(found[1]) if found else None

    def output_lines(self, printed: Sequence[str], output: Path) -> list[str]:  # noqa: ARG002
        """What is printed after the search."""
        ended = [number for number, line in enumerate(printed) if _TRANSLATED.search(line)]
        return list(printed[ended[-1] + 1 :]) if ended else []
