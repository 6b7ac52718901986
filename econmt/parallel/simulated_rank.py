"""Simulates one rank of several: its training step does all the work of that rank without communicating.

Its results are meaningless; its memory and compute time are those of a real rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor, nn

from econmt.config.recipe import ParallelSection
from econmt.engine.communicator import Communicator, Json
from econmt.engine.precision import Precision
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.parallel.groups import Group, Pending
from econmt.parallel.pipeline.costs import plan_by_weights
from econmt.parallel.pipeline.model_parts import divided
from econmt.parallel.pipeline.partition import PipelinePlan
from econmt.parallel.pipeline.stages import Stages
from econmt.parallel.pipeline.step import PipelinedStep
from econmt.parallel.reduction import BucketedReduction, travelling
from econmt.parallel.sharding import OptimizerShares, largest_share
from econmt.tasks.protocol import Shape, Task
from econmt_ops.core.arguments import Gathered


class Rank(NamedTuple):
    """Number of a rank, from 0, and number of ranks."""

    number: int = 0
    size: int = 1

    @property
    def text(self) -> str:
        """Description for messages; empty for a single rank."""
        return f"rank {self.number} of {self.size}" if self.size > 1 else ""


ALONE = Rank()


def ranks_that_differ(
    settings: ParallelSection, size: int, parameters: Sequence[int], device: str
) -> list[Rank]:
    """Returns the ranks that suffice to find the largest memory: all pipeline stages, or those with the largest share.

    ``parameters`` are sizes, in the model's order. On a "cpu" the last rank draws the dropout masks of all rows before
    its own.
    """
    last = [Rank(size - 1, size)] if device == "cpu" else [Rank(0, size)]
    if settings.pipeline > 1:
        return [Rank(number, size) for number in range(size - settings.pipeline, size)]
    if not settings.shard_optimizer or size == 1:
        return last
    fullest, _ = largest_share(parameters, size)
    return list(dict.fromkeys([Rank(fullest, size), *(last if device == "cpu" else [])]))


def simulated_step(
    task: Task,
    model: nn.Module,
    rank: Rank,
    shape: Shape,
    precision: Precision | None = None,
    *,
    implementations: Implementations | None = None,
    target_device: str | None = None,
    plan: PipelinePlan | None = None,
) -> TrainingStep:
    """Creates the training step of one rank of the recipe's parallel training, without the other ranks.

    Args:
        task, model, precision, implementations, target_device: See :class:`econmt.engine.step.TrainingStep`.
        plan: Placement of the layers on pipeline stages; None: balanced by the layers' numbers of weights.
    """
    communicator = Communicator() if rank.size == 1 else SimulatedRank(rank, task.recipe.parallel)
    options: dict[str, Any] = {
        "implementations": implementations,
        "communicator": communicator,
        "target_device": target_device,
    }
    if communicator.stages == 1:
        return TrainingStep(task, model, precision, **options)
    division = divided(model, plan or plan_by_weights(model, communicator.stages, shape))
    stages = _SimulatedStages(rank, communicator.stages)
    return PipelinedStep(task, model, stages, division, precision, **options)


class SimulatedRank(Communicator):
    """Communicator of a simulated rank."""

    def __init__(self, rank: Rank, settings: ParallelSection) -> None:
        self.rank, self.size = rank
        self.stages, self._settings = settings.pipeline, settings

    def gather(self, value: Json, *, patient: bool = False) -> list[Json]:  # noqa: ARG002  there is no other rank
        """See :meth:`econmt.engine.communicator.Communicator.gather`."""
        return [value] * self.size

    def reduction(self, parameters: Iterable[nn.Parameter]) -> BucketedReduction | None:
        """See :meth:`econmt.engine.communicator.Communicator.reduction`."""
        group = _SimulatedGroup(self.rank, self.size)
        return None if self.stages > 1 else BucketedReduction(parameters, group, travelling(self._settings))

    def shares(self, parameters: Iterable[nn.Parameter]) -> OptimizerShares | None:
        """See :meth:`econmt.engine.communicator.Communicator.shares`."""
        if not self._settings.shard_optimizer:
            return None
        return OptimizerShares(parameters, self.rank, _SimulatedGroup(self.rank, self.size))


class _CompletedWork:
    """A communication that is complete at once."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self) -> Any:
        """Returns the result immediately."""
        return self._result


class _SimulatedGroup(Group):
    """Simulated group: gathers copies of the local tensor, receives zeros."""

    def __init__(self, rank: int, size: int) -> None:
        Group.__init__(self, size, None)  # also of simulated stages, which join no processes
        self.rank = rank

    def all_reduce(self, tensor: Tensor) -> Pending:  # noqa: ARG002
        return _CompletedWork()

    def reduce(self, tensor: Tensor, rank: int) -> Pending:  # noqa: ARG002
        return _CompletedWork()

    def broadcast(self, tensor: Tensor, rank: int) -> Pending:
        if rank != self.rank:
            tensor.zero_()
        return _CompletedWork()

    def gather(self, tensor: Tensor) -> Gathered:
        local = tensor.contiguous()
        gathered = local.new_empty(self.size, *local.shape)
        return _CompletedWork(gathered.copy_(local.expand_as(gathered)))

    def counts(self, local: list[int]) -> list[list[int]]:  # without tensors, which may be fake
        return [local] * self.size


class _SimulatedStages(_SimulatedGroup, Stages):
    """Simulated stages of a pipeline; what they receive is zeros."""

    def __init__(self, rank: Rank, size: int) -> None:
        self.replicas = rank.size // size
        self.replica, stage = divmod(rank.number, size)
        super().__init__(stage, size)

    def of_replicas(self, watched: Callable[[], AbstractContextManager[None]]) -> Group:  # noqa: ARG002
        return _SimulatedGroup(self.replica, self.replicas)

    def send(self, tensor: Tensor, rank: int) -> Pending:  # noqa: ARG002
        return _CompletedWork()

    def receive(self, tensor: Tensor, rank: int) -> Pending:  # noqa: ARG002
        tensor.zero_()
        return _CompletedWork()
