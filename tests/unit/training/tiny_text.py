"""A language model so small that a test can train it many times: walks over a few words."""

from __future__ import annotations

import io
import random
from pathlib import Path

from rich.console import Console

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.recovery import find_start
from econmt.config.recipe import Recipe, load_recipe
from econmt.data.batching.store import PreparedData, prepare
from econmt.training.context import RunContext
from econmt.training.run import make_trainer, train
from econmt.training.trainer import Trainer, TrainingResult
from tests.unit.training.tiny import context_of

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


def write_lines(folder: Path, counts: dict[str, int]) -> None:
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


class TextRun:
    """One recipe and its folder."""

    def __init__(self, text: Path, output: Path, overrides: tuple[str, ...] = ()) -> None:
        path = output.with_name(output.name + ".yaml")
        path.write_text(RECIPE.format(text=text, output=output))
        self.recipe: Recipe = load_recipe(path, overrides)
        self.path = path
        self.folder = ModelFolder(output)
        self.text = text
        self.console = Console(file=io.StringIO(), width=400)

    def prepared(self) -> PreparedData:
        assert self.recipe.data.prepared is not None
        return prepare(self.recipe, Path(self.recipe.data.prepared), [self.text], show_progress=False)

    def context(self) -> RunContext:
        self.folder.create()
        start = find_start(self.recipe, self.folder, resume_with_changes=False)
        return context_of(self.recipe, self.folder, self.prepared(), start)

    def trainer(self) -> Trainer:
        return make_trainer(self.context())[0]

    def train(self) -> TrainingResult:
        return train(self.context(), self.console)
