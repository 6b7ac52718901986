"""A language model so small that a test can train it many times: walks over a few words."""

from __future__ import annotations

import random
from pathlib import Path

from tests.unit.training.tiny import Run

RECIPE = """
name: walk
task: language_model
output: {output}
data:
  text: txt
  train: [{text}/train]
  valid: {text}/valid
  test: {text}/test
  subwords: {{type: words, size: 50}}
  prepared: {text}/prepared
model:
  embedding: 6
  size: 8
  dropout: {{embedding: 0.1, inputs: 0.1, layers: 0.1, output: 0.1, weights: 0.2, variational: true}}
  weight_tying: softmax
training:
  batch: {{size: 3}}
  bptt: 5
  optimizer: {{name: sgd, learning_rate: 2.0}}
  gradient_clipping: {{threshold: 0.5}}
  max_updates: 12
  checkpoint_interval: 4
  early_stopping: {{max_num_checkpoint_not_improved: null}}
  device: cpu
  threads: 1
  log_interval: 5
  keep_last_params: 1
"""
WORDS = "abcdefgh"


def write_lines(folder: Path, counts: dict[str, int]) -> Path:
    """Writes NAME.txt with so many lines; each word is one of two that may follow the one before it."""
    draw = random.Random(3)
    place = 0
    for name, count in counts.items():
        lines = []
        for _ in range(count):
            words = []
            for _ in range(draw.randint(0, 6)):
                place = (3 * place + 1 + draw.randrange(2)) % len(WORDS)
                words.append(WORDS[place])
            lines.append(" ".join(words) + "\n")
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


class TextRun(Run):
    """One recipe of a language model and its folder."""

    form = RECIPE
