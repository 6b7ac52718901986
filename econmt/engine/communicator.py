"""The processes that train one model together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

Json = TypeVar("Json")
"""JSON value; nothing that comes from another process can execute."""


class Event(Protocol):
    """Interface of `torch.cuda.Event`: a point in a stream of a GPU."""

    def record(self, stream: Any) -> None:
        """Lets a stream pass it after what it has been given."""

    def query(self) -> bool:
        """Returns True if the GPU has passed it."""

    def synchronize(self) -> None:
        """Waits until then."""


class Reduction(Protocol):
    """Adds gradients up over all ranks, as far as it can while the backward pass still runs."""

    def begin(self) -> None:
        """From now on a gradient that is complete may leave: the backward pass of an update's last batch begins."""

    def pack(self) -> None:
        """Takes the memory that is still missing for what will leave: a rank without it can say so before any sends."""

    def finish(self, loss: Tensor) -> None:
        """Waits until every gradient, and the ``loss``, is the sum over all ranks, in place."""

    def abandon(self) -> None:
        """Forgets what has begun, after an error in the backward pass."""


class Shares(Protocol):
    """Assignment of parameters to ranks, each of which has the optimizer's state of its own parameters only."""

    @property
    def owned(self) -> list[nn.Parameter]:
        """Parameters that this rank updates."""

    def spread(self) -> None:
        """Gives every rank the values of parameters that others have updated."""


class Communicator:
    """A single process: every collective is a no-op.

    Whoever trains asks it: the step adds up gradients, each rank takes its share of a batch's rows, and rank 0 alone
    writes. A world of several processes (:class:`econmt.parallel.processes.Processes`) overrides all of it.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
        local_size: how many of them are on this host.
        stages: how many of them, neighbours, hold one model together.
    """

    rank = 0
    size = 1
    local_size = 1
    stages = 1

    @property
    def replica(self) -> int:
        """Index of this process's share of a batch's rows."""
        return self.rank // self.stages

    @property
    def replicas(self) -> int:
        """Number of shares into which a batch's rows are divided."""
        return self.size // self.stages

    @property
    def is_rank_zero(self) -> bool:
        """True for the process that writes files and prints."""
        return self.rank == 0

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Adds each tensor up over all ranks, in place on every rank."""

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Gives every rank the values of one, in place."""

    def gather(self, value: Json, *, patient: bool = False) -> list[Json]:  # noqa: ARG002  there is no other
        """The values of all ranks, in their order; JSON. ``patient``: waits for a slower rank without a limit."""
        return [value]

    def on_rank_zero(self, function: Callable[[], Json]) -> Json:
        """Calls a function on rank 0, however long it takes, and gives its result, JSON, to all."""
        return function()

    def barrier(self) -> None:
        """Waits until rank 0 has reached this point."""
        self.on_rank_zero(lambda: None)

    def all_reduce_max(self, *values: int) -> list[int]:
        """The largest of each value over all ranks."""
        return list(values)

    def all_reduce_max_later(self, *values: int) -> Callable[[], list[int]]:
        """Starts :meth:`all_reduce_max`; calling the result waits for it and returns the values."""
        return lambda: list(values)

    def reduction(self, parameters: Iterable[nn.Parameter]) -> Reduction | None:  # noqa: ARG002  there is no other
        """Returns the reduction of the gradients of parameters, or None for one rank."""
        return None

    def shares(self, parameters: Iterable[nn.Parameter]) -> Shares | None:  # noqa: ARG002  there is no other
        """Returns the assignment of parameters to ranks, or None if each rank updates all."""
        return None

    def wait(self, event: Event) -> None:
        """Waits for a GPU, which may wait for other ranks."""
        event.synchronize()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it an exchange that fails, since a rank is gone, is told as that."""
        yield

    def destroy(self) -> None:
        """Gives up, on all ranks at once, what exchanges need; graphs that hold some must be gone before."""

    def note(self, update: int) -> None:
        """Takes note of the update that is done, by which a rank that has stopped is found."""


def rows_of_share(rows: int, size: int) -> int:
    """Rows that each of ``size`` ranks has of a batch of so many; the last ones may be padding."""
    return -(-rows // size)


def jsonable(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return [jsonable(each) for each in value] if isinstance(value, (list, tuple)) else value
