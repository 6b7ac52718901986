"""Runs with derived buckets: what is computed, that they resume, and that plans know their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from econmt.data.batching.batches import Batch
from econmt.engine.devices import trims_batches
from econmt.engine.step import StepResult, TrainingStep
from tests.unit.training.conftest import UseRows
from tests.unit.training.tiny import MakeRun, metrics

DERIVED = ("training.bucket_width=null", "training.max_buckets=3")
EXACT = ("model.dropout=0.0", "training.gradient_clipping.type=none")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches of which a loss is computed for training, as the model gets them."""
    seen: list[Batch] = []
    gradient = TrainingStep.gradient

    def spy(step: TrainingStep, batches: Sequence[Batch], *rest: Any, **options: Any) -> StepResult:
        seen.extend(batches)
        return gradient(step, batches, *rest, **options)

    monkeypatch.setattr(TrainingStep, "gradient", spy)
    return seen


def is_tight(batch: Batch) -> bool:
    own = int(batch.source_lengths.max()), int(batch.target_lengths.max())
    return own == (batch.source.shape[1], batch.target_output.shape[1])


@pytest.mark.parametrize("wanted", ["auto", "always"])
def test_on_a_cpu_batches_are_cut_to_their_longest_pair(
    make_run: MakeRun, computed: list[Batch], wanted: str
) -> None:
    make_run(*DERIVED, f"training.trim_batches={wanted}").train()
    assert len(computed) == 8
    assert all(is_tight(batch) for batch in computed)


def test_untrimmed_batches_have_the_shapes_of_buckets(make_run: MakeRun, computed: list[Batch]) -> None:
    run = make_run(*DERIVED, "training.trim_batches=never", "training.max_updates=16").trained()
    shapes = {shape[:2] for shape in run.trainer().batches.shapes()}
    assert len(shapes) <= 3
    assert {(batch.source.shape[1], batch.target_output.shape[1]) for batch in computed} == shapes
    assert not all(is_tight(batch) for batch in computed)


def test_auto_leaves_a_gpu_few_shapes() -> None:
    for device, auto in ((torch.device("cpu"), True), (torch.device("cuda:1"), False)):
        assert trims_batches("auto", device) is auto
        assert trims_batches("always", device)
        assert not trims_batches("never", device)


CHANGING = (
    "data.mixing={weights: [[3, 1], [0, 1]], epochs: [2], epoch_pairs: 13}",
    "data.noise={upper: 0.2, typos: 0.3, emoji: 0.2, markup: 0.2}",
    "data.tags=['', <BT>]",
)


def test_a_plan_has_the_shapes_of_the_buckets_and_the_run_learns_the_same(make_run: MakeRun) -> None:
    text = make_run().text
    exact = (*EXACT, f"data.train=[{text}/train, {text}/valid]", *CHANGING)
    free = make_run(*DERIVED, *exact, name="free").trained()
    bounded = make_run(*DERIVED, *exact, "training.memory_budget=1GiB", name="bounded").trained()
    trainer = bounded.trainer()
    assert {entry[:2] for entry in trainer.budget.plan} == {shape[:2] for shape in trainer.batches.shapes()}
    for mine, other in zip(metrics(bounded.folder), metrics(free.folder), strict=True):
        assert mine["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert mine["target_tokens"] == other["target_tokens"]


def test_parts_of_a_divided_batch_are_trimmed_by_themselves(
    make_run: MakeRun, computed: list[Batch], use_rows: UseRows
) -> None:
    use_rows(1)
    make_run(*DERIVED, "training.memory_budget=1GiB", "training.max_updates=2").train()
    parts = computed[1:]  # the first one is the rehearsal
    assert {len(batch.indices) for batch in parts} == {1}
    assert all(is_tight(batch) for batch in parts)
