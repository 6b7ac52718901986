"""What a rank is told to hold is what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from econmt.config.recipe import load_recipe
from econmt.engine.communicator import Communicator
from econmt.engine.measurement import measure_step
from econmt.engine.step import TrainingStep
from econmt.estimate.training_step import estimate_step
from econmt.model import translation
from econmt.parallel.pipeline.costs import plan_by_weights
from econmt.parallel.pipeline.model_parts import divided
from econmt.parallel.pipeline.stages import Stages
from econmt.parallel.pipeline.step import PipelinedStep
from econmt.parallel.simulated_rank import Rank
from econmt.tasks.language_model import LanguageModelTask
from econmt.tasks.protocol import Shape, Task
from econmt.tasks.translation import TranslationTask
from econmt_ops.dispatch.rule import rules_only
from tests.unit.parallel.group import Group
from tests.unit.parallel.pipeline_checks import NO_PENALTIES

CPU = torch.device("cpu")
SMALL = ("model.embedding=16", "model.encoder.size=32", "model.decoder.size=32", "model.attention.size=48")
WINDOWS = ("model.layers=4", "model.size=32", "model.embedding=32", "training.batch.size=12")
SHAPE = Shape(24, 7, 5)


def task_of(name: str, overrides: tuple[str, ...]) -> Task:
    if name == "wikitext2":
        return LanguageModelTask(load_recipe(name, [*WINDOWS, *NO_PENALTIES, *overrides]), 97)
    return TranslationTask(load_recipe(name, [*SMALL, *overrides]), 97, 97)


def measured(
    communicator: Communicator, name: str, overrides: tuple[str, ...], shape: Shape
) -> dict[str, int]:
    """A job: bytes at the peak of a step of this rank, and of parts of them."""
    task = task_of(name, overrides)
    translation.DISTINCT = 0.0
    torch.manual_seed(1)
    model = task.build_model().train()
    stages = task.recipe.parallel.pipeline
    step: TrainingStep
    with rules_only():
        if stages > 1:
            communicator.stages = stages
            parts = divided(model, plan_by_weights(model, stages, shape))
            step = PipelinedStep(task, model, Stages(stages, CPU), parts, communicator=communicator)
        else:
            step = TrainingStep(task, model, communicator=communicator)
        found = measure_step(step, task.example(shape), timed=False)
    kinds = ("weights", "gradients", "optimizer state")
    return {"peak": found.peak, "stash": found.stashed, **{kind: found.category(kind) for kind in kinds}}


FED, NOT_FED = (f"model.decoder.input_feeding={value}" for value in ("true", "false"))
SHARD, STAGES = "parallel.shard_optimizer=true", "parallel.pipeline=2"
CASES = [
    pytest.param(2, "iwslt", (), SHAPE, id="rows", marks=pytest.mark.thorough),
    pytest.param(3, "iwslt", (SHARD, "training.memory_budget=1GiB"), SHAPE, id="shares"),
    pytest.param(2, "iwslt", ("parallel.reduction=bfloat16",), Shape(2, 2, 1), id="what travels"),
    pytest.param(2, "wikitext2", (STAGES,), Shape(12, 1, 9), id="stages"),
    pytest.param(2, "gnmt", (STAGES, FED), SHAPE, id="stages, fed", marks=pytest.mark.thorough),
    pytest.param(4, "gnmt", (STAGES, NOT_FED), SHAPE, id="two pipelines", marks=pytest.mark.slow),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "name", "overrides", "shape"), CASES)
def test_a_rank_is_told_what_it_holds(
    group: Group, ranks: int, name: str, overrides: Any, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = task_of(name, overrides).recipe.parallel.model_dump()
    monkeypatch.setattr(translation, "DISTINCT", 0.0)
    for number, found in enumerate(group.run(ranks, measured, name, overrides, shape, **settings)):
        told = estimate_step(task_of(name, overrides), shape, rank=Rank(number, ranks))
        assert told.rank == f"rank {number} of {ranks}"
        assert told.peak == pytest.approx(found["peak"], rel=0.02)
        assert told.stashed == pytest.approx(found["stash"], rel=0.02)
        for kind in ("weights", "optimizer state"):
            assert told.category(kind) == found[kind]
