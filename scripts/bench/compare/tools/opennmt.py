"""OpenNMT-py 3.5."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from .. import toolkit as matched
from ..measure import Reading
from ..toolkit import Command, Places, Toolkit

_TRAIN = re.compile(r"Step\s+(\d+)/\s*\d+;.* bsz:\s*\d+/\s*(\d+)/\s*\d+;")
CONFIG = f"""
keep_checkpoint: 1
report_every: {matched.LOG_EVERY}
seed: 1
world_size: 1
num_workers: 0
bucket_size: 29000  # sentences sorted by length at a time: all, where the default would hold them nine times
model_type: text
encoder_type: brnn
decoder_type: rnn
rnn_type: LSTM
enc_layers: 1
dec_layers: 1
word_vec_size: {matched.EMBEDDING}
hidden_size: {matched.HIDDEN}
global_attention: mlp
input_feed: 1
dropout: [0.0]
attention_dropout: [0.0]
batch_size: {matched.BATCH}
batch_type: sents
batch_size_multiple: 1
optim: adam
adam_beta2: 0.999
learning_rate: {matched.LEARNING_RATE}
max_grad_norm: {matched.CLIP_NORM}
normalization: tokens
"""


class OpenNMT(Toolkit):
    """OpenNMT-py: a YAML file for training, options for translation."""

    name = "OpenNMT-py"
    package = "OpenNMT-py"
    loads_pickles = True
    translated = re.compile(r"Total translation time \(s\): ([\d.]+)")

    def _command(self, places: Places, program: str, *arguments: object) -> Command:
        return Command.python(places, matched.LAUNCHER, "opennmt", program, *arguments)

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Writes the configuration; returns a command that saves the model at the last update."""
        assert matched.ATTENTION == matched.HIDDEN, "OpenNMT-py's attention has the decoder's size"
        source, target = matched.SOURCE, matched.TARGET
        files = (str(places.tokens("train", side)) for side in (source, target))
        config = yaml.safe_load(CONFIG) | {
            "data": {"corpus_1": dict(zip(("path_src", "path_tgt"), files, strict=True))},
            "src_vocab": str(places.data / f"vocabulary.{source}.opennmt.txt"),
            "tgt_vocab": str(places.data / f"vocabulary.{target}.opennmt.txt"),
            "save_model": str(model / "model"),
            "save_checkpoint_steps": updates,
            "train_steps": updates,
            "valid_steps": 10 * updates,
            "gpu_ranks": [] if self.device == "cpu" else [0],
        }
        path = places.work / f"{model.name}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return self._command(places, "train", "-config", path)

    def translate(self, places: Places, model: Path, output: Path) -> Command:
        """Returns a command that translates with the newest model of the folder."""
        saved = max(model.glob("model_step_*.pt"), default=model / "model_step.pt")
        files = "-model", saved, "-src", places.tokens("test", matched.SOURCE), "-output", output
        options = (
            f"-beam_size {matched.BEAM} -batch_size {matched.BATCH} -batch_type sents "
            f"-max_length {matched.LONGEST_OUTPUT} -gpu {-1 if self.device == 'cpu' else 0} -report_time"
        )
        return self._command(places, "translate", *files, *options.split())

    def reading(self, line: str) -> Reading | None:
        """Reads the second part of ``bsz``, the mean of target tokens an update since the last line."""
        found = _TRAIN.search(line)
        return Reading(int(found[1]), matched.LOG_EVERY * float(found[2])) if found else None
