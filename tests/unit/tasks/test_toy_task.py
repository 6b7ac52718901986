"""A trainer knows no more of what is learnt than a Task says: here sums, learnt by a model of two matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.config.recipe import Recipe
from econmt.data.batching.batches import Batch, BatchIterator
from econmt.data.batching.store import PreparedData
from econmt.engine.measurement import measure_step
from econmt.engine.step import TrainingStep
from econmt.estimate.training_step import estimate_step
from econmt.model import Implementations
from econmt.tasks import registry
from econmt.tasks.protocol import Figure, Shape, Task
from econmt.tasks.translation import TranslationTask
from tests.unit.training.tiny import MakeRun, Run, assert_parts_are_the_whole, metrics, write_text


@dataclass(frozen=True)
class LettersTask:
    """Which letters a source has, guessed for every target position: nothing recurrent, no translations."""

    recipe: Recipe
    sizes: tuple[int, int]
    name = "letters"
    translates = False
    evaluation = TranslationTask.evaluation

    @classmethod
    def of(cls, recipe: Recipe, source: int, target: int) -> LettersTask:
        return cls(recipe, (source, target))

    def build_model(self) -> nn.Module:
        source, target = self.sizes
        return nn.Sequential(nn.Embedding(source, 5), nn.Linear(5, target))

    def batches(self, prepared: PreparedData) -> BatchIterator:
        return TranslationTask(self.recipe, *self.sizes).batches(prepared)

    def example(self, shape: Shape) -> Batch:
        return TranslationTask(self.recipe, *self.sizes).example(shape)

    def loss(
        self, model: nn.Module, batch: Batch, _implementations: Implementations, label_smoothing: float = 0.0
    ) -> Tensor:
        assert isinstance(model, nn.Sequential)
        table, output = model
        logits = output(table(batch.source).mean(1))[:, None, :].expand(-1, batch.target_output.shape[1], -1)
        options: Any = {"ignore_index": 0, "reduction": "sum", "label_smoothing": label_smoothing}
        return functional.cross_entropy(logits.flatten(0, 1), batch.target_output.flatten(), **options)

    def figures(self, model: nn.Module, _prepared: PreparedData) -> list[Figure]:
        return [Figure("valid_tokens", lambda batch, _: (batch.target_output != 0).sum(), scale=7.0)]

    def search_model(self, model: nn.Module) -> None:
        """Nothing is translated."""

    def description(self) -> dict[str, Any]:
        return {"sizes": list(self.sizes)}

    def layers(self, model: nn.Module) -> dict[str, str]:
        names = (name for name, _ in model.named_parameters())
        return {name: "embedding" if name.startswith("0") else "output" for name in names}


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    text = write_text(tmp_path / "text", {"train": 30, "valid": 6})
    # A recipe knows only the tasks that there are: this one takes the place of one of them.
    monkeypatch.setitem(registry.TASKS, "translation", LettersTask.of)

    return lambda *overrides, name="run": Run(text, tmp_path / name, overrides)


def test_the_trainer_learns_it(make_run: MakeRun) -> None:
    run = make_run("training.max_updates=24", "training.checkpoint_interval=8")
    assert run.train().update == 24
    rows = metrics(run.folder)
    assert rows[-1]["valid_perplexity"] < rows[0]["valid_perplexity"] < 60
    assert all(math.isnan(row["bleu"]) for row in rows)
    assert [row["valid_tokens"] for row in rows] == [7.0] * len(rows)
    task: Task = run.trainer().task
    assert task.name == "letters"


def test_a_run_in_parts_is_the_run_that_never_stopped(make_run: MakeRun) -> None:
    assert_parts_are_the_whole(make_run, ends=(4, 8))


def test_the_ledger_and_the_estimate_account_for_it(make_run: MakeRun) -> None:
    task = make_run().trainer().task
    step = TrainingStep(task, task.build_model().train())
    shape = Shape(64, 30, 4)
    torch.manual_seed(1)
    measured = measure_step(step, task.example(shape), timed=False)
    estimated = estimate_step(task, shape)
    weights = 4 * sum(part.numel() for part in step.model.parameters())
    assert measured.category("weights") == estimated.category("weights") == weights
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)
    assert measured.tokens == estimated.tokens == 64 * 4
