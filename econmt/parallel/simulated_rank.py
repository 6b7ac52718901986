"""One rank of several without the others: its training step does all that a rank does, and exchanges with nobody.

What it computes is worth nothing; what it holds is what the rank holds, and the time is that of its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor, nn

from econmt.config.recipe import ParallelSection
from econmt.engine.communicator import Communicator, Json
from econmt.engine.precision import Precision
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.parallel.groups import Members
from econmt.parallel.pipeline.costs import PipelinePlan, divided, plan_by_weights
from econmt.parallel.pipeline.stages import Stages
from econmt.parallel.pipeline.step import PipelinedStep
from econmt.parallel.reduction import BucketedReduction, travelling
from econmt.parallel.sharding import OptimizerShares, largest_share
from econmt.tasks.protocol import Shape, Task
from econmt_ops.core.gathering import Gathered


class Rank(NamedTuple):
    """Rank, from 0, and number of ranks."""

    number: int = 0
    size: int = 1

    @property
    def text(self) -> str:
        """For a person; empty if it is alone."""
        return f"rank {self.number} of {self.size}" if self.size > 1 else ""


ALONE = Rank()


def ranks_that_differ(
    settings: ParallelSection, size: int, parameters: Sequence[int], device: str
) -> list[Rank]:
    """The ranks of which one holds the most: all stages of a pipeline, or those that can have the most of some part.

    Args:
        settings: of the recipe. size: how many ranks there are.
        parameters: their sizes, in the model's order.
        device: "cpu" or "cuda"; on a CPU the last rows' dropout masks are drawn after those of all others.
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
    """The step of a rank as the recipe shares work, without the others.

    Args:
        task, model, precision, implementations, stands_for: as :class:`econmt.engine.step.TrainingStep` has them.
        rank: whose.
        shape: of its batches.
        plan: how a pipeline divides the model; None: by the layers' weights.
    """
    settings = task.recipe.parallel
    communicator = Communicator() if rank.size == 1 else SimulatedRank(rank, settings)
    if communicator.stages == 1:
        return TrainingStep(
            task,
            model,
            precision,
            implementations=implementations,
            communicator=communicator,
            target_device=target_device,
        )
    if plan is None:
        plan = plan_by_weights(model, communicator.stages, shape)
    return PipelinedStep(
        task,
        model,
        _Stages(rank, communicator.stages),
        divided(model, plan),
        precision,
        implementations=implementations,
        communicator=communicator,
        target_device=target_device,
    )


class SimulatedRank(Communicator):
    """The world of a rank without the others.

    Args:
        rank: which. settings: of the recipe.
    """

    def __init__(self, rank: Rank, settings: ParallelSection) -> None:
        self.rank, self.size = rank
        self.stages, self._settings = settings.pipeline, settings

    def gather(self, value: Json, *, patient: bool = False) -> list[Json]:  # noqa: ARG002  nobody is waited for
        """See :meth:`econmt.engine.communicator.Communicator.gather`."""
        return [value] * self.size

    def reduction(self, parameters: Iterable[nn.Parameter]) -> BucketedReduction:
        """See :meth:`econmt.engine.communicator.Communicator.reduction`."""
        return BucketedReduction(parameters, _Nobody(self.rank, self.size), travelling(self._settings))

    def shares(self, parameters: Iterable[nn.Parameter]) -> OptimizerShares | None:
        """See :meth:`econmt.engine.communicator.Communicator.shares`."""
        if not self._settings.shard_optimizer:
            return None
        return OptimizerShares(parameters, self.rank, _Nobody(self.rank, self.size))


class _Done:
    """An exchange with nobody."""

    def wait(self) -> None:
        """Nothing."""


class _Nobody:
    """See :class:`econmt.parallel.groups.Members`; others have what this one has, and what they send is zeros."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self.size = rank, size

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce(self, _tensor: Tensor) -> _Done:
        return _Done()

    def broadcast(self, tensor: Tensor, rank: int) -> _Done:
        if rank != self._rank:
            tensor.zero_()
        return _Done()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self.size)]

    def counts(self, own: list[int]) -> list[list[int]]:
        return [own] * self.size


class _RankCopies:
    """See :class:`econmt_ops.core.gathering.Gathered`."""

    def __init__(self, tensor: Tensor, size: int) -> None:
        self._all = tensor.new_empty(size, *tensor.shape)
        self._all.copy_(tensor.expand_as(self._all))

    def wait(self) -> Tensor:
        return self._all


class _Stages(Stages):
    """See :class:`econmt.parallel.pipeline.stages.Stages`; what comes from others is zeros."""

    def __init__(self, rank: Rank, size: int) -> None:
        self.size, self.replicas = size, rank.size // size
        self.replica, self.rank = divmod(rank.number, size)

    def of_replicas(self, watched: Callable[[], AbstractContextManager[None]]) -> Members:  # noqa: ARG002
        return _Nobody(self.replica, self.replicas)

    def send(self, tensor: Tensor, rank: int) -> _Done:  # noqa: ARG002
        return _Done()

    def receive(self, tensor: Tensor, rank: int) -> _Done:  # noqa: ARG002
        tensor.zero_()
        return _Done()

    def gather(self, tensor: Tensor) -> Gathered:
        return _RankCopies(tensor.contiguous(), self.size)

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        if rank != self.rank:
            tensor.zero_()

    def reduce(self, tensor: Tensor, rank: int) -> None:
        """Nothing is added."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Nothing is added."""
