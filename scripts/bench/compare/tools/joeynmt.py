"""Joey NMT 2.3."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from .. import toolkit as matched
from ..toolkit import Command, Places, Toolkit

LAYER = (
    "type: recurrent, rnn_type: lstm, num_layers: 1, dropout: 0.0, "
    f"embeddings: {{embedding_dim: {matched.EMBEDDING}, scale: false}}"
)
CONFIG = f"""
name: compare
random_seed: 1
data: {{dataset_type: plain}}
testing:
  batch_size: {matched.BATCH}
  batch_type: sentence
  beam_size: {matched.BEAM}
  beam_alpha: 1.0
  max_output_length: {matched.LONGEST_OUTPUT}
  eval_metrics: []
training:
  optimizer: adam
  learning_rate: {matched.LEARNING_RATE}
  scheduling: exponential  # a release of 2024 cannot make the others on today's torch
  decrease_factor: 1.0
  clip_grad_norm: {matched.CLIP_NORM}
  batch_size: {matched.BATCH}
  batch_type: sentence
  normalization: tokens
  epochs: 1000
  logging_freq: {matched.LOG_EVERY}
  keep_best_ckpts: 1
  overwrite: true
  print_valid_sents: []
model:
  encoder: {{{LAYER}, hidden_size: {matched.HIDDEN // 2}, bidirectional: true}}
  decoder: {{{LAYER}, hidden_size: {matched.HIDDEN}, hidden_dropout: 0.0, attention: bahdanau, input_feeding: true,
    init_hidden: bridge}}
"""


class JoeyNMT(Toolkit):
    """Joey NMT: a YAML file for training and one for translation."""

    name = "Joey NMT"
    package = "joeynmt"
    loads_pickles = True
    translated = re.compile(r"Generation took ([\d.]+)\[sec\]")

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Writes the configuration; returns a command that saves the model when the last validation finds it best."""
        updates = max(matched.LOG_EVERY, updates // matched.LOG_EVERY * matched.LOG_EVERY)
        config = yaml.safe_load(CONFIG)
        config |= {"model_dir": str(model), "use_cuda": False}
        config["data"] |= {"train": str(places.data / "train"), "dev": str(places.data / "valid")}
        for side, language in (("src", matched.SOURCE), ("trg", matched.TARGET)):
            vocabulary = str(places.data / f"vocabulary.{language}.joeynmt.txt")
            config["data"][side] = {"lang": language, "level": "word", "voc_file": vocabulary}
        config["testing"]["load_model"] = str(model / "best.ckpt")
        config["training"] |= {"updates": updates, "validation_freq": updates}
        path = places.work / f"{model.name}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return Command.python(places, matched.LAUNCHER, "joeynmt", "train", path, "--skip-test")

    def translate(self, places: Places, model: Path, output: Path) -> Command:  # noqa: ARG002
        """Returns a command that prints translations of standard input: its option for a file fails in 2.3.0."""
        config, pieces = places.work / f"{model.name}.yaml", places.tokens("test", matched.SOURCE)
        return Command.python(places, "-m", "joeynmt", "translate", config, standard_input=pieces)

    def output_lines(self, printed: Sequence[str], output: Path) -> list[str]:  # noqa: ARG002
        """Returns the lines that follow the search."""
        ended = [number for number, line in enumerate(printed) if self.translated.search(line)]
        return list(printed[ended[-1] + 1 :]) if ended else []
