"""The training step of a run: of one process, of its rank among others, or of its stage in a pipeline of ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from torch import nn

from econmt.config.recipe import Recipe
from econmt.data.batching.batch import Batches
from econmt.engine.communicator import Communicator, rows_of_share
from econmt.engine.precision import Precision
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.model import Implementations
from econmt.parallel.pipeline.costs import PipelinePlan, divided, measured_link, plan_pipeline
from econmt.parallel.pipeline.stages import Stages
from econmt.parallel.pipeline.step import PipelinedStep
from econmt.tasks.protocol import Shape, Task, device_of
from econmt_ops.dispatch.rule import captured


class Made(NamedTuple):
    """A step, what a state remembers of how it is divided over ranks, and lines for the log."""

    step: TrainingStep
    pipeline: dict[str, Any]
    notes: list[str]


def check_ranks(recipe: Recipe, size: int) -> None:
    """Makes sure that so many ranks can be divided into the pipelines of a recipe.

    Raises:
        InputError: they cannot.
    """
    stages = recipe.parallel.pipeline
    if size % stages:
        raise InputError(
            f"parallel.pipeline {stages}: {size} {'processes' if size > 1 else 'process'} cannot be divided into "
            f"pipelines of {stages}; give --processes {stages}, or a multiple of it, or parallel.pipeline=1"
        )


def make_step(
    task: Task,
    model: nn.Module,
    batches: Batches,
    precision: Precision,
    communicator: Communicator,
    saved: dict[str, Any],
) -> Made:
    """The step of a run that begins or goes on.

    Args:
        task: what is learnt.
        model: on the device.
        batches: of training.
        precision: of products and feature maps.
        world: the processes that train together; from now on it knows its stages.
        saved: what rank 0 has of a state of this run, so that it goes on divided as it was; empty for a new one.
    """
    count = task.recipe.parallel.pipeline
    if count == 1:
        return Made(TrainingStep(task, model, precision, communicator=communicator), {}, [])
    frequent = max(batches.shapes(), key=lambda shape: shape.batches * shape.rows)
    shape = Shape(rows_of_share(frequent.rows, communicator.size // count), frequent.source, frequent.target)
    return make_pipeline(task, model, shape, precision, communicator, saved)


def make_pipeline(
    task: Task,
    model: nn.Module,
    shape: Shape,
    precision: Precision,
    communicator: Communicator,
    saved: dict[str, Any],
    implementations: Implementations | None = None,
) -> Made:
    """The step of a stage of a pipeline.

    Args:
        task, model, precision, world, saved: as `make_step` has them; the recipe says how many stages.
        shape: of the batches of a replica that come most often, for which layers are divided.
        implementations: of the ops; None: those of the recipe.
    """
    recipe = task.recipe
    communicator.stages = count = recipe.parallel.pipeline
    how = Implementations.of(recipe.ops) if implementations is None else implementations
    device = device_of(model)
    with communicator.watched():
        stages = Stages(count, device, timedelta(seconds=recipe.parallel.timeout))
        size = shape.rows * recipe.model.widest * precision.dtype.itemsize
        link = measured_link(stages, device, size)

    def planned() -> list[Any]:
        if saved.get("stages") == count:
            return [saved["homes"], saved["chunks"], "pipeline: divided as the run began"]
        with captured(device.type == "cuda" and recipe.training.in_graphs):
            return list(plan_pipeline(model, count, shape, link, precision, how))

    plan = PipelinePlan(*communicator.on_rank_zero(planned))
    step = PipelinedStep(
        task, model, stages, divided(model, plan), precision, implementations=how, communicator=communicator
    )
    remembered = {"stages": count, "homes": plan.homes, "chunks": plan.chunks}
    return Made(step, remembered, [plan.note])
