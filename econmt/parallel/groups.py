"""Groups of ranks, and collective operations between their members."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """An asynchronous communication in progress."""

    def wait(self) -> object:
        """Waits until the communication is done; on a GPU only the current stream waits."""


class Group:
    """Group of ranks, which all call its collective operations in the same order.

    Collectives run in a context of :meth:`econmt.engine.communicator.Communicator.watched`.
    """

    def __init__(self, size: int, group: Any, watched: Callable[[], AbstractContextManager[None]]) -> None:
        self.size, self._group, self.watched = size, group, watched

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Starts to sum a tensor over all ranks, in place; the tensor must not change until that is done."""
        return started(dist.all_reduce(tensor, group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor, rank: int) -> Pending:
        """Starts to copy the tensor of one rank to all others, in place."""
        return started(dist.broadcast(tensor, rank, group=self._group, async_op=True))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have the same shape."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor, group=self._group)
        return tensors

    def counts(self, local: list[int]) -> list[list[int]]:
        """Returns the lists of integers of all ranks."""
        return [numbers.tolist() for numbers in self.gather(torch.tensor(local))]


def started(work: dist.Work | None) -> Pending:
    """Returns an asynchronous operation, which torch.distributed declares to be optional."""
    assert work is not None
    return work
