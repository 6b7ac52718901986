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
from tests.unit.training.tiny import MakeRun

DERIVED = ("training.bucket_width=null", "training.max_buckets=3")


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


@pytest.mark.parametrize("wanted", ["auto", "always", "never"])
def test_on_a_cpu_batches_are_cut_to_their_longest_pair_unless_they_keep_the_shapes_of_buckets(
    make_run: MakeRun, computed: list[Batch], wanted: str
) -> None:
    run = make_run(*DERIVED, f"training.trim_batches={wanted}", "training.max_updates=16").trained()
    assert len(computed) == 16
    assert all(is_tight(batch) for batch in computed) == (wanted != "never")
    shapes = {shape[:2] for shape in run.trainer().batches.shapes()}
    assert len(shapes) <= 3
    found = {(batch.source.shape[1], batch.target_output.shape[1]) for batch in computed}
    assert (found == shapes) == (wanted == "never")


def test_a_gpu_has_few_shapes_and_parts_of_a_batch_are_trimmed(
    make_run: MakeRun, computed: list[Batch], use_rows: UseRows
) -> None:
    for device, auto in ((torch.device("cpu"), True), (torch.device("cuda:1"), False)):
        assert trims_batches("auto", device) is auto
        assert trims_batches("always", device)
        assert not trims_batches("never", device)
    use_rows(1)
    make_run(*DERIVED, "training.memory_budget=1GiB", "training.max_updates=2").train()
    parts = computed[1:]  # the first one is the rehearsal
    assert {len(batch.indices) for batch in parts} == {1}
    assert all(is_tight(batch) for batch in parts)
