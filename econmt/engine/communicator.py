"""Communication between the processes that train one model together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

Json = TypeVar("Json")
"""JSON values; exchanging only these means that nothing received from another process is ever executed."""


class Reduction(Protocol):
    """Sums gradients over all ranks, overlapped with the backward pass where possible."""

    def begin(self) -> None:
        """Starts sending gradients as they are completed: the backward pass of an update's last batch begins."""

    def pack(self) -> None:
        """Allocates the missing send buffers, so that a rank that lacks memory fails before any rank sends."""

    def finish(self, loss: Tensor) -> None:
        """Waits until every gradient and the ``loss`` hold the sums over all ranks, in place."""

    def abandon(self) -> None:
        """Discards a reduction that has begun, after an error in the backward pass."""


class Shares(Protocol):
    """Assignment of parameters to the ranks that update them, when optimizer state is divided among ranks."""

    @property
    def owned(self) -> list[nn.Parameter]:
        """Parameters that this rank updates."""

    def spread(self) -> None:
        """Broadcasts the updated values of each parameter from its owner to all ranks."""


class Communicator:
    """Communicator of a single process: every collective is a no-op.

    The training step uses it to sum gradients, each rank takes its share of a batch's rows from it, and only rank 0
    writes. The communicator of several processes is that of :func:`econmt.parallel.processes.joined`.

    Attributes:
        rank: Rank of this process, from 0.
        size: Number of processes.
        local_size: Number of processes on this host.
        stages: Number of consecutive ranks that hold one model together, as pipeline stages.
    """

    rank = 0
    size = 1
    local_size = 1
    stages = 1

    @property
    def replica(self) -> int:
        """Number of this process's share of a batch's rows, from 0."""
        return self.rank // self.stages

    @property
    def replicas(self) -> int:
        """Number of shares that a batch's rows are divided into."""
        return self.size // self.stages

    @property
    def is_rank_zero(self) -> bool:
        """True if this process, rank 0, writes files and prints."""
        return self.rank == 0

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Copies the tensors' values from rank ``source`` to every rank, in place."""

    def gather(self, value: Json, *, patient: bool = False) -> list[Json]:  # noqa: ARG002  there is one rank
        """Returns the JSON values of all ranks in rank order; if ``patient``, waits without a time limit."""
        return [value]

    def on_rank_zero(self, function: Callable[[], Json]) -> Json:
        """Calls a function on rank 0, however long it takes, and returns its JSON result on all ranks."""
        return function()

    def barrier(self) -> None:
        """Waits until rank 0 has reached this point."""
        self.on_rank_zero(lambda: None)

    def all_reduce_max(self, *values: int) -> list[int]:
        """Returns the maximum of each value over all ranks."""
        return self.all_reduce_max_later(*values)()

    def all_reduce_max_later(self, *values: int) -> Callable[[], list[int]]:
        """Starts :meth:`all_reduce_max` without waiting; calling the result returns the maxima."""
        return lambda: list(values)

    def reduction(self, parameters: Iterable[nn.Parameter]) -> Reduction | None:  # noqa: ARG002  there is one rank
        """Creates the reduction that sums the parameters' gradients during the backward pass.

        Returns None for a single rank, and for pipelines, whose gradients are complete only after the last chunk.
        """
        return None

    def shares(self, parameters: Iterable[nn.Parameter]) -> Shares | None:  # noqa: ARG002  there is one rank
        """Returns which rank updates which parameters; None if each rank updates all of them."""
        return None

    def wait(self, event: torch.cuda.Event) -> None:
        """Waits for a GPU event, which may depend on other ranks."""
        event.synchronize()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turns the failure of a collective because a rank is gone into an error that says so."""
        yield

    def destroy(self) -> None:
        """Releases communication resources, on all ranks together, after all CUDA graphs with collectives are gone."""

    def note(self, update: int) -> None:
        """Records the number of the last update, from which a rank that has stopped is detected."""


def rows_of_share(rows: int, size: int) -> int:
    """Returns the rows of a batch of ``rows`` for each of ``size`` ranks; the last rank's may include padding."""
    return -(-rows // size)


def jsonable(value: Any) -> Any:
    """Converts tuples to lists, recursively, as JSON stores them."""
    return [jsonable(item) for item in value] if isinstance(value, (list, tuple)) else value
