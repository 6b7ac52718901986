"""Some ranks, between which tensors travel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> object:
        """Until it is done; on a GPU the current stream waits."""


class Members(Protocol):
    """Collectives among some ranks, which all call them in the same order.

    Attributes:
        size: how many they are.
    """

    size: int

    def watched(self) -> AbstractContextManager[None]:
        """See :meth:`econmt.engine.communicator.Communicator.watched`."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Begins to add a tensor up over all of them, in place; it must stay as it is until that is done."""

    def broadcast(self, tensor: Tensor, rank: int) -> Pending:
        """Begins to give all of them the values of one, in place."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of each, all of one shape."""

    def counts(self, own: list[int]) -> list[list[int]]:
        """Some numbers of each."""


class Group:
    """Ranks that exchange through a group of torch.distributed; see :class:`Members`.

    Args:
        size: how many. group: of torch.
        watched: the context of an exchange.
    """

    def __init__(self, size: int, group: Any, watched: Callable[[], AbstractContextManager[None]]) -> None:
        self.size, self._group, self.watched = size, group, watched

    def all_reduce(self, tensor: Tensor) -> Pending:
        """See :class:`Members`, as the others."""
        return _begun(dist.all_reduce(tensor, group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, rank: int) -> Pending:
        """See :class:`Members`."""
        return _begun(dist.broadcast(tensor, rank, group=self._group, async_op=True))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See :class:`Members`."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self._group)
        return found

    def counts(self, own: list[int]) -> list[list[int]]:
        """See :class:`Members`."""
        return [each.tolist() for each in self.gather(torch.tensor(own))]


def _begun(work: dist.Work | None) -> Pending:
    assert work is not None
    return work
