"""A run so small that a test can do it many times: reverse a few letters."""

from __future__ import annotations

import io
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console
from torch import Tensor, nn

from econmt.checkpoint.checkpoints import load_state
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.recovery import Start, find_start
from econmt.config.recipe import Recipe, load_recipe, recipe_text
from econmt.data.batching.batches import Batch
from econmt.data.batching.store import PreparedData, prepare
from econmt.engine.communicator import Communicator
from econmt.engine.devices import resolve_device
from econmt.model import Implementations
from econmt.tasks.translation import TranslationTask
from econmt.training.context import RunContext, make_context
from econmt.training.interrupts import Interrupted, Interrupts
from econmt.training.run import make_trainer, train
from econmt.training.trainer import Trainer, TrainingResult

RECIPE = """
name: reverse
output: {output}
data:
  source: src
  target: trg
  train: [{text}/train]
  valid: {text}/valid
  subwords: {{type: words, source: 50, target: 50}}
  prepared: {text}/prepared
model:
  embedding: 6
  encoder: {{layers: 1, size: 8}}
  decoder: {{layers: 1, size: 8}}
  attention: {{size: 8}}
  dropout: 0.2
training:
  batch: {{type: sentence, size: 4}}
  bucket_width: 4
  optimizer: {{learning_rate: 0.02}}
  max_updates: 8
  checkpoint_interval: 2
  log_interval: 3
  keep_last_params: 1
  device: cpu
  threads: 1
  seed: 7
decoding: {{beam_size: 2, max_output_factor: 0.5}}
"""


def watch_losses(monkeypatch: pytest.MonkeyPatch, note: Callable[[Batch, Implementations], object]) -> None:
    """From now on ``note`` is told of every batch of which a loss is computed, and how; it may fail."""
    real = TranslationTask.loss

    def loss(
        task: TranslationTask, model: nn.Module, batch: Batch, implementations: Implementations, *more: float
    ) -> Tensor:
        note(batch, implementations)
        return real(task, model, batch, implementations, *more)

    monkeypatch.setattr(TranslationTask, "loss", loss)


def script(monkeypatch: pytest.MonkeyPatch, *perplexities: float) -> None:
    """Makes validation find these perplexities, one a checkpoint."""
    values = iter(perplexities)
    monkeypatch.setattr("econmt.training.validation.perplexity", lambda *arguments: next(values))


def leave(trainer: Trainer) -> None:
    """Saves a run between two checkpoints."""
    trainer.folder.recipe.write_text(recipe_text(trainer.recipe))
    interrupts = Interrupts()
    interrupts.received = signal.SIGTERM
    with pytest.raises(Interrupted, match="run the same command to resume"):
        trainer._save_and_stop(interrupts)


def write_text(folder: Path, pairs: Mapping[str, int]) -> Path:
    """Writes NAME.src and NAME.trg with as many pairs as the mapping says; returns the folder."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(5)
    for name, count in pairs.items():
        lines = [[draw.choice("abcdefgh") for _ in range(draw.randint(1, 6))] for _ in range(count)]
        (folder / f"{name}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{name}.trg").write_text(
            "".join(" ".join(reversed(line)).upper() + "\n" for line in lines)
        )
    return folder


def write_guides(folder: Path) -> None:
    """Writes word alignments of train and valid and weights of the pairs of train, beside their text."""
    for split in ("train", "valid"):
        lines = [line.split() for line in (folder / f"{split}.src").read_text().splitlines()]
        links = [" ".join(f"{i}-{len(line) - 1 - i}" for i in range(len(line))) for line in lines]
        (folder / f"{split}.align").write_text("\n".join(links) + "\n")
        if split == "train":
            (folder / "train.weights").write_text("".join(f"{0.5 + n % 3}\n" for n in range(len(lines))))


def write_recipe(path: Path, text: Path, output: Path) -> Path:
    """Writes the recipe; returns its path."""
    path.write_text(RECIPE.format(text=text, output=output))
    return path


def context_of(
    recipe: Recipe,
    folder: ModelFolder,
    prepared: PreparedData,
    start: Start,
    communicator: Communicator | None = None,
) -> RunContext:
    """The context of a run that begins there."""
    saved = None if start.commit is None else load_state(folder, start.commit)
    device = resolve_device(recipe.training.device)
    return make_context(recipe, folder, prepared, start, saved, device, communicator or Communicator())


class Run:
    """One recipe and its folder."""

    form = RECIPE

    def __init__(self, text: Path, output: Path, overrides: tuple[str, ...] = ()) -> None:
        self.path = output.with_name(output.name + ".yaml")
        self.path.write_text(self.form.format(text=text, output=output))
        self.recipe: Recipe = load_recipe(self.path, overrides)
        self.folder = ModelFolder(output)
        self.text = text
        self.console = Console(file=io.StringIO(), width=400)

    def prepared(self) -> PreparedData:
        return prepare(self.recipe, Path(self.recipe.data.prepared), [self.text], show_progress=False)

    def context(self, *, resume_with_changes: bool = False) -> RunContext:
        self.folder.create()
        start = find_start(self.recipe, self.folder, resume_with_changes=resume_with_changes)
        return context_of(self.recipe, self.folder, self.prepared(), start)

    def trainer(self, *, resume_with_changes: bool = False) -> Trainer:
        return make_trainer(self.context(resume_with_changes=resume_with_changes))[0]

    def train(self, *, resume_with_changes: bool = False) -> TrainingResult:
        return train(self.context(resume_with_changes=resume_with_changes), self.console)

    def trained(self) -> Self:
        """Trains; returns the run."""
        self.train()
        return self

    def said(self) -> str:
        file: Any = self.console.file
        value: str = file.getvalue()
        return value


MakeRun = Callable[..., Run]


def snapshot(folder: ModelFolder) -> dict[str, bytes]:
    """What two runs of one recipe must have in common: parameters, hypotheses, metrics without times."""
    files = {path.name: path.read_bytes() for path in folder.path.glob("*.safetensors")}
    files |= {path.name: path.read_bytes() for path in folder.path.glob("hypotheses.*")}
    files |= {
        str(path.relative_to(folder.path)): path.read_bytes() for path in folder.states.rglob("*.safetensors")
    }
    times = {"seconds", "target_tokens_per_second", "peak_memory_bytes"}
    rows = [{name: value for name, value in row.items() if name not in times} for row in metrics(folder)]
    return {**files, "metrics.tsv": repr(rows).encode()}


def assert_parts_are_the_whole(make: MakeRun, *overrides: str, ends: Sequence[int]) -> Run:
    """Checks that a run which ends at each of these updates is the run that never stopped, which is returned."""
    whole = make(*overrides, f"training.max_updates={ends[-1]}", name="whole").trained()
    for updates in ends:
        parts = make(*overrides, f"training.max_updates={updates}", name="parts").trained()
    assert snapshot(parts.folder) == snapshot(whole.folder)
    return whole


def metrics(folder: ModelFolder) -> list[dict[str, float]]:
    header, *rows = (line.split("\t") for line in folder.metrics.read_text().splitlines())
    return [dict(zip(header, map(float, row), strict=True)) for row in rows]
