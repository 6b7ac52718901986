"""Runs whose embeddings get sparse gradients are those with dense ones."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from econmt.budget.run_budget import divide
from econmt.data.batching.batches import Batch
from econmt.engine.step import TrainingStep
from econmt.model import Implementations, layers
from tests.unit.training.conftest import UseRows
from tests.unit.training.tiny import MakeRun, metrics, watch_losses

JOINT = "data.subwords={type: bpe, size: 30, joint: true}"
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "momentum": ("training.optimizer={name: sgd, learning_rate: 0.5, momentum: 0.9}",),
    "embedding dropout": ("model.dropout={embedding: 0.3}",),
    "several batches": ("training.update_interval=3",),
    "micro-batches": ("training.memory_budget=1GiB",),
    "src_trg": (JOINT, "model.weight_tying=src_trg"),
    "trg_softmax": ("model.weight_tying=trg_softmax",),
    "src_trg_softmax": (JOINT, "model.weight_tying=src_trg_softmax"),
    "no input feeding": ("model.decoder={input_feeding: false, size: 8}",),
}


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> set[torch.layout]:
    """The layouts of the gradients from which updates are made, but for those of which memory is estimated."""
    found: set[torch.layout] = set()
    update = TrainingStep.update

    def noted(step: TrainingStep) -> None:
        gradients = [part.grad for part in step.model.parameters() if part.grad is not None]
        found.update(each.layout for each in gradients if not isinstance(each, FakeTensor))
        update(step)

    monkeypatch.setattr(TrainingStep, "update", noted)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_learns_the_same(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    use_rows: UseRows,
    layouts: set[torch.layout],
    name: str,
) -> None:
    use_rows(2)
    rows, short = [], ("training.max_updates=4", "training.gradient_clipping.threshold=0.5")
    for few in (0, 10**9):
        monkeypatch.setattr(layers, "_FEW", few)
        layouts.clear()
        run = make_run(*VARIANTS[name], *short, name=str(few)).trained()
        # Gradients that others are added to are made dense, and so are those of a matrix that is an output layer too.
        dense = few > 0 or name in ("several batches", "micro-batches", "src_trg_softmax")
        assert (torch.sparse_coo not in layouts) == dense
        rows.append(metrics(run.folder))
    for sparse, dense in zip(*rows, strict=True):
        assert sparse["train_loss"] == pytest.approx(dense["train_loss"], rel=1e-5)
        assert sparse["valid_perplexity"] == pytest.approx(dense["valid_perplexity"], rel=1e-5)


def test_memory_that_is_full_leaves_nothing_of_the_gradient_behind(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, use_rows: UseRows
) -> None:
    """The second of two parts fails: both are computed again, in smaller parts."""
    monkeypatch.setattr(layers, "_FEW", 0)
    found = []
    for rows in (1, 2):
        use_rows(rows)
        run = make_run("training.memory_budget=1GiB", "model.dropout=0.0", name=f"rows{rows}")
        trainer = run.trainer()
        parts: list[int] = []

        def full(batch: Batch, _: object, rows: int = rows, parts: list[int] = parts) -> None:
            parts.append(len(batch.indices))
            if rows == 2 and parts == [2, 2]:
                raise MemoryError

        batch = next(trainer.batches)
        assert len(divide(batch, trainer.budget.plan, Implementations())) == 4 // rows
        with monkeypatch.context() as patch:
            watch_losses(patch, full)
            norm = trainer.gradient([batch]).norm
        trainer.step.update()
        assert parts == {1: [1, 1, 1, 1], 2: [2, 2, 1, 1, 1, 1]}[rows]
        found.append([norm, *(parameter.detach() for parameter in trainer.parameters.values())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
