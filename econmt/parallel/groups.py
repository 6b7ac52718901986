"""Groups of ranks, and collective operations between their members."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from econmt_ops.core.arguments import Gathered


class Pending(Protocol):
    """An asynchronous communication in progress."""

    def wait(self) -> object:
        """Waits until the communication is done; on a GPU only the current stream waits."""


class Group:
    """Group of ranks, numbered from 0, which all call its collective operations in the same order.

    Collectives run in a context of :meth:`econmt.engine.communicator.Communicator.watched`.
    """

    def __init__(
        self, size: int, group: Any, watched: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.size, self._group, self.watched = size, group, watched

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Starts to sum a tensor over all ranks, in place; the tensor must not change until that is done."""
        return started(dist.all_reduce(tensor, group=self._group, async_op=True))

    def reduce(self, tensor: Tensor, rank: int) -> Pending:
        """Starts to sum a tensor over all ranks into that of one rank; on others its values are lost."""
        return started(dist.reduce(tensor, group=self._group, group_dst=rank, async_op=True))

    def broadcast(self, tensor: Tensor, rank: int) -> Pending:
        """Starts to copy the tensor of one rank to all others, in place."""
        return started(dist.broadcast(tensor, group=self._group, group_src=rank, async_op=True))

    def gather(self, tensor: Tensor) -> Gathered:
        """Starts to gather a tensor from all ranks; see :class:`econmt_ops.core.arguments.Gather`."""
        return _Gathering(tensor.contiguous(), self._group, self.size)

    def counts(self, local: list[int]) -> list[list[int]]:
        """Returns the lists of integers of all ranks."""
        counts: list[list[int]] = self.gather(torch.tensor(local)).wait().tolist()
        return counts


class _Gathering:
    """Gathering of a tensor from every rank, in progress."""

    def __init__(self, tensor: Tensor, group: Any, size: int) -> None:
        self._tensor = tensor  # keeps the tensor alive until it has been sent
        self._all = tensor.new_empty(size, *tensor.shape)
        self._work = started(dist.all_gather([*self._all.unbind(0)], tensor, group=group, async_op=True))

    def wait(self) -> Tensor:
        """Returns the tensors of all ranks, (R, ...)."""
        self._work.wait()
        return self._all


def started(work: dist.Work | None) -> Pending:
    """Returns an asynchronous operation, which torch.distributed declares to be optional."""
    assert work is not None
    return work
