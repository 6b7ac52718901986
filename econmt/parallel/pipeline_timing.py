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
from econmt.parallel.pipeline_costs import Plan, divided, measured_link, plan_pipeline
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
        busy: seconds of a processor that one took in this process, the median: what it waited for is not in them.
        tokens: target tokens of one.
        loss: a token, of the first and of the last update.
        notes: what was told on the way.
    """

    seconds: float
    busy: float
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


class Timer:
    """Updates on one batch, timed in turns with others.

    Args:
        run: what is timed.
        step: of it. notes: of how it was made.
        meet: waits for all who compute an update together.
    """

    def __init__(self, run: Run, step: TrainingStep, notes: list[str], meet: Callable[[], object]) -> None:
        self._step, self._notes, self._meet = step, notes, meet
        self._graphed: GraphedStep | None = None
        torch.manual_seed(run.recipe.training.seed)
        self._batch = step.task.example(run.shape)
        if run.device.type == "cuda" and run.graphs:
            self._graphed = GraphedStep(step, note=notes.append)
        self._times: list[float] = []
        self._busy: list[float] = []
        self._losses: list[float] = []

    def turn(self, updates: int) -> None:
        """So many more; the first ones of all are not timed."""
        for _ in range(updates if self._losses else WARM_UP + updates):
            torch.manual_seed(len(self._losses))  # of dropout on a CPU, whoever else has drawn
            self._meet()
            began, busy = time.perf_counter(), time.process_time()
            step = self._step if self._graphed is None else self._graphed
            loss = float(step([self._batch]).loss)  # which waits for the device
            self._times.append(time.perf_counter() - began)
            self._busy.append(time.process_time() - busy)
            self._losses.append(loss / self._batch.target_tokens)

    @property
    def timed(self) -> Timed:
        """What all turns took."""
        seconds, busy = (
            sorted(each[WARM_UP:])[len(each[WARM_UP:]) // 2] for each in (self._times, self._busy)
        )
        losses = self._losses[0], self._losses[-1]
        return Timed(seconds, busy, self._batch.target_tokens, losses, self._notes)


def alone(run: Run) -> Timer:
    """One process with the whole model."""
    torch.manual_seed(run.recipe.training.seed)
    task = task_of_sizes(run.recipe, run.sizes)
    step = TrainingStep(task, task.build_model().to(run.device).train(), run.precision)
    return Timer(run, step, [], lambda: None)


def pipelined(run: Run, stages: Stages, plan: Plan | None = None) -> Timer:
    """The ranks of a pipeline, of which all call this, and the timer's turns, at once.

    Args:
        run: the same on all ranks but for the device.
        stages: of which there is one replica.
        plan: how layers are divided; None: by what is measured.
    """
    torch.manual_seed(run.recipe.training.seed)
    task = task_of_sizes(run.recipe, run.sizes)
    model = task.build_model().to(run.device).train()
    if plan is None:
        values = run.shape.rows * run.recipe.model.widest * run.precision.dtype.itemsize
        link = measured_link(stages, run.device, values)

        def planned() -> list[Any]:
            how = Implementations.of(run.recipe.ops)
            with captured(run.device.type == "cuda" and run.graphs):
                return list(plan_pipeline(model, stages.size, run.shape, link, run.precision, how))

        plan = Plan(*_from_first(planned))
    step = PipelinedStep(task, model, stages, divided(model, plan), run.precision)
    return Timer(run, step, [plan.note], distributed.barrier)


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
