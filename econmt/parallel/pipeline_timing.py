"""How fast a recipe trains on the ranks of a pipeline, or on one: updates on random text of one shape."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed

from econmt.engine.graphs import GraphedStep
from econmt.engine.precision import Precision
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.parallel.pipeline import PipelinedStep
from econmt.parallel.pipeline_costs import Plan, check_model, divided, measured_link, plan_pipeline
from econmt.parallel.stages import Stages
from econmt.recipe import Recipe
from econmt.tasks.protocol import Shape
from econmt.tasks.registry import task_of_sizes
from econmt_ops.dispatch.rule import captured

WARM_UP = 3
"""Updates before the first that is timed."""


class Timed(NamedTuple):
    """What updates took.

    Attributes:
        seconds: of one, the median.
        tokens: target tokens of one.
        loss: a token, of the first and of the last update.
        notes: what was told on the way.
    """

    seconds: float
    tokens: int
    loss: tuple[float, float]
    notes: list[str]

    @property
    def rate(self) -> float:
        """Target tokens a second."""
        return self.tokens / self.seconds


class Run(NamedTuple):
    """What is timed.

    Attributes:
        recipe: of the model. sizes: of its vocabularies. shape: of every batch.
        precision: of products. device: of this rank. graphs: whether a GPU replays steps.
    """

    recipe: Recipe
    sizes: tuple[int, ...]
    shape: Shape
    precision: Precision
    device: torch.device
    graphs: bool = True


def alone(run: Run, updates: int) -> Timed:
    """Times one process with the whole model."""

    def make() -> tuple[TrainingStep, list[str]]:
        torch.manual_seed(run.recipe.training.seed)
        task = task_of_sizes(run.recipe, run.sizes)
        return TrainingStep(task, task.build_model().to(run.device).train(), run.precision), []

    return _timed(run, make, updates, lambda: None)


def pipelined(run: Run, stages: Stages, updates: int, plan: Plan | None = None) -> Timed:
    """Times the ranks of a pipeline, of which all call this at once.

    Args:
        run: the same on all ranks but for the device.
        stages: of which there is one replica.
        updates: that are timed.
        plan: how layers are divided; None: by what is measured.
    """

    def make() -> tuple[TrainingStep, list[str]]:
        torch.manual_seed(run.recipe.training.seed)
        task = task_of_sizes(run.recipe, run.sizes)
        model = task.build_model().to(run.device).train()
        check_model(model, stages.size)
        chosen = plan
        if chosen is None:
            values = run.shape.rows * run.recipe.model.widest * run.precision.dtype.itemsize
            link = measured_link(stages, run.device, values)

            def planned() -> list[Any]:
                how = Implementations.of(run.recipe.ops)
                with captured(run.device.type == "cuda" and run.graphs):
                    return list(plan_pipeline(model, stages.size, run.shape, link, run.precision, how))

            chosen = Plan(*_from_first(planned))
        step = PipelinedStep(task, model, stages, divided(model, chosen), run.precision)
        return step, [chosen.note]

    return _timed(run, make, updates, distributed.barrier)


def _timed(
    run: Run,
    make: Callable[[], tuple[TrainingStep, list[str]]],
    updates: int,
    meet: Callable[[], object],
) -> Timed:
    step, notes = make()
    torch.manual_seed(run.recipe.training.seed)
    batch = step.task.example(run.shape)
    graphed = None
    if run.device.type == "cuda" and run.graphs:
        graphed = GraphedStep(step, note=notes.append)
    losses, times = [], []
    for _ in range(WARM_UP + updates):
        meet()
        began = time.perf_counter()
        result = step([batch]) if graphed is None else graphed([batch])
        losses.append(float(result.loss) / batch.target_tokens)  # which waits for the device
        times.append(time.perf_counter() - began)
    middle = sorted(times[WARM_UP:])[updates // 2]
    return Timed(middle, batch.target_tokens, (losses[0], losses[-1]), notes)


def _from_first(function: Callable[[], Any]) -> Any:
    """Calls a function on the first process and gives what it returns, JSON, to all."""
    text = json.dumps(function()).encode() if distributed.get_rank() == 0 else b""
    size = torch.tensor(len(text))
    distributed.broadcast(size, 0)
    letters = torch.zeros(int(size), dtype=torch.uint8)
    if text:
        letters.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    distributed.broadcast(letters, 0)
    return json.loads(bytes(letters.tolist()))
