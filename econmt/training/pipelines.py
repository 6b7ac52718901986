"""Creates the training step of a run: for a single process, for data parallelism, or for a pipeline stage."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import nn

from econmt.config.recipe import Recipe
from econmt.engine.communicator import Communicator, rows_of_share
from econmt.engine.precision import Precision
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.parallel.pipeline.costs import measured_link, plan_pipeline
from econmt.parallel.pipeline.model_parts import divided
from econmt.parallel.pipeline.partition import PipelinePlan
from econmt.parallel.pipeline.stages import Stages
from econmt.parallel.pipeline.step import PipelinedStep
from econmt.tasks.protocol import Shape, Task
from econmt.training.choice import frequent_shape
from econmt.training.context import RunContext
from econmt_ops.dispatch.rule import captured


def check_ranks(recipe: Recipe, size: int) -> None:
    """Checks that the number of ranks is a multiple of the recipe's pipeline stages.

    Raises:
        InputError: It is not.
    """
    stages = recipe.parallel.pipeline
    if size % stages:
        raise InputError(
            f"parallel.pipeline {stages}: {size} {'processes' if size > 1 else 'process'} cannot be divided into "
            f"pipelines of {stages}; use --processes {stages}, or a multiple of it, or parallel.pipeline=1"
        )


def make_step(
    task: Task, model: nn.Module, context: RunContext
) -> tuple[TrainingStep, dict[str, Any], list[str]]:
    """Creates the training step of a new or resumed run; ``model``: model of the task on the device.

    It sets the communicator's number of stages. A resumed run keeps its pipeline division.

    Returns:
        The step, its pipeline division to be saved in the state, and lines for the log.
    """
    precision, communicator, count = context.precision, context.communicator, context.recipe.parallel.pipeline
    if count == 1:
        return TrainingStep(task, model, precision, communicator=communicator), {}, []
    frequent = frequent_shape(task.batches(context.prepared))
    shape = frequent._replace(rows=rows_of_share(frequent.rows, communicator.size // count))
    saved = {} if context.saved is None else context.saved.pipeline
    return make_pipeline(task, model, shape, precision, communicator, saved)


def make_pipeline(
    task: Task,
    model: nn.Module,
    shape: Shape,
    precision: Precision,
    communicator: Communicator,
    saved: dict[str, Any],
    implementations: Implementations | None = None,
) -> tuple[TrainingStep, dict[str, Any], list[str]]:
    """Creates the training step of a pipeline stage; returns what :func:`make_step` does.

    Args:
        shape: Most frequent shape of a replica's batches, for which layers are divided.
        saved: Pipeline division saved by rank 0, which is kept; empty for a new run.
        implementations: Implementations of the ops; None: those of the recipe.
    """
    recipe = task.recipe
    communicator.stages = count = recipe.parallel.pipeline
    chosen = Implementations.of(recipe.ops) if implementations is None else implementations
    device = next(model.parameters()).device
    with communicator.watched():
        stages = Stages(count, device, timedelta(seconds=recipe.parallel.timeout))
        size = shape.rows * recipe.model.widest * precision.dtype.itemsize
        link = measured_link(stages, device, size)

    def planned() -> list[Any]:
        if saved.get("stages") == count:
            return [saved["homes"], saved["chunks"], "pipeline: divided as at the beginning of the run"]
        with captured(device.type == "cuda" and recipe.training.in_graphs):
            return list(plan_pipeline(model, count, shape, link, precision, chosen))

    plan = PipelinePlan(*communicator.on_rank_zero(planned))
    step = PipelinedStep(
        task,
        model,
        stages,
        divided(model, plan),
        precision,
        implementations=chosen,
        communicator=communicator,
    )
    division = {"stages": count, "homes": plan.homes, "chunks": plan.chunks}
    return step, division, [plan.note]
