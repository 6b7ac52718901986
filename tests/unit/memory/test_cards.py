"""Plans for a small GPU: 24 multiprocessors, 99 KB of shared memory and 8 GB, such as an RTX 4060."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from econmt.budget.planner import Planner, estimator, usable
from econmt.budget.prices import settings
from econmt.config.recipe import load_recipe
from econmt.data.batching.batches import BatchShape
from econmt.engine.machine import total_memory
from econmt.engine.precision import precision_of
from econmt.estimate.byte_budget import AUTO_SHARE
from econmt.model import Implementations
from econmt.tasks.translation import TranslationTask
from econmt_ops.backends.triton import partition as division
from econmt_ops.backends.triton.partition import Partition
from econmt_ops.dispatch.device_limits import limits_of
from tests.ops.simulated_gpu import simulated_gpu

GPU = torch.device("cuda", 0)
CARD: dict[str, Any] = {"capability": (8, 9), "multiprocessors": 24, "memory": 8 << 30}
WORKLOADS = {
    "multi30k": (6000, 6000, BatchShape(21, 22, 64, 64)),
    "student": (8000, 8000, BatchShape(50, 50, 128, 128)),
    "iwslt": (17_191, 7_709, BatchShape(100, 100, 128, 128)),  # Echo's model and batch
    "gnmt": (32_000, 32_000, BatchShape(25, 25, 4096, 4096)),
}
"""Vocabularies and largest batch by recipe."""
PARTS = {"multi30k": 1, "student": 1, "iwslt": 1, "gnmt": 2}
"""Micro-batches, at least, of a batch by recipe."""
PERSISTENT = {"multi30k": {256}, "iwslt": {256}, "student": set(), "gnmt": set()}
"""Units of the LSTM layers that are small enough for persistent launches, by recipe."""


@pytest.mark.parametrize(
    "name",
    ["multi30k", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("student", "iwslt", "gnmt"))],
)
def test_recipes_fit_a_card_of_8_gb_with_kernels_that_fit_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions: list[tuple[int, bool, Partition]] = []
    divide = division.divide

    def watched(batch: int, hidden: int, *others: Any, back: bool, **options: Any) -> Partition | None:
        found = divide(batch, hidden, *others, back=back, **options)
        if found is not None:
            partitions.append((hidden, back, found))
        return found

    monkeypatch.setattr(division, "divide", watched)
    recipe = load_recipe(name)
    *sizes, shape = WORKLOADS[name]
    task = TranslationTask(recipe, *sizes)
    with simulated_gpu(**CARD):
        budget = int(AUTO_SHARE * total_memory(GPU))
        assert budget == int(0.9 * 8 * 2**30)
        peak = estimator(task, "cuda", precision_of("auto", GPU))
        choices = settings(Implementations.of(recipe.ops), "cuda")
        (found,) = Planner([shape], choices, budget, peak, accumulating=False, width=8).allot()
        limits = limits_of(GPU)
    assert found.parts >= PARTS[name]
    assert found.rows * found.parts >= shape.rows
    assert 0 < found.peak <= usable(budget)
    assert {hidden for hidden, _, _ in partitions} == PERSISTENT[name]
    for hidden, back, partition in partitions:
        terms, outputs = (4 * hidden, partition.units) if back else (hidden, 4 * partition.units)
        assert partition.parts(hidden) <= partition.programs <= limits.multiprocessors == 24
        assert partition.shared(terms, outputs, 2) <= limits.shared == 101_376
        assert partition.split == 1


def test_without_the_limits_more_layers_are_persistent() -> None:
    with simulated_gpu(**CARD):
        assert division.divide(64, 512, torch.bfloat16, limits_of(GPU), back=False) is None
    assert division.divide(64, 512, torch.bfloat16, limits_of(GPU), back=False) is not None
