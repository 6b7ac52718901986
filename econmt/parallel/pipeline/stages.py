"""The ranks of a pipeline: who is in which, and how tensors travel between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, distributed

from econmt.parallel.groups import Group, Members, Pending
from econmt_ops.core.gathering import Gathered


class Stages:
    """The ranks that hold one model together, of which each has a stage.

    Of N processes with pipelines of S stages, rank g has stage g % S of replica g // S: the stages of a replica are
    neighbours, which talk the most. All processes make this at once, since groups are made together.

    Args:
        size: S, of which the processes are a multiple; the default process group exists.
        device: of what travels: NCCL carries it between GPUs, gloo between CPUs.
        timeout: after which an exchange is given up; None: torch's.

    Attributes:
        size: S. rank: this one's stage. replica: whose stage it is. replicas: how many there are.
    """

    def __init__(self, size: int, device: torch.device, timeout: timedelta | None = None) -> None:
        processes, rank = distributed.get_world_size(), distributed.get_rank()
        self.size = size
        self.replicas = processes // size
        self.replica, self.rank = divmod(rank, size)
        self._first = self.replica * size
        gpu = device.type == "cuda"
        backend = "nccl" if gpu else "gloo"

        def group(ranks: range) -> Any:
            return distributed.new_group([*ranks], backend=backend, timeout=timeout)

        self._group = [group(range(first, first + size)) for first in range(0, processes, size)][self.replica]
        self._data = [group(range(stage, processes, size)) for stage in range(size)][self.rank]
        # NCCL may run all that a group does one after the other: pairs that talk at the same time get one each.
        self._pairs: dict[tuple[int, int], Any] = {}
        for first in range(0, processes, size) if gpu else ():
            for low, high in combinations(range(size), 2):
                pair = group(range(first + low, first + high + 1, high - low))
                if first == self._first:
                    self._pairs[low, high] = pair
        if gpu:
            self._connect(torch.zeros(1, device=device))

    def _connect(self, tensor: Tensor) -> None:
        """Makes NCCL open all its connections, which it cannot do while a CUDA graph is captured."""
        for group in (self._group, self._data):
            distributed.all_reduce(tensor, group=group)
        for low, high in self._pairs:
            if self.rank == low:
                self.send(tensor, high).wait()
            elif self.rank == high:
                self.receive(tensor, low).wait()

    def of_replicas(self, watched: Callable[[], AbstractContextManager[None]]) -> Members:
        """The ranks that have this stage, one a replica; ``watched`` is the context of an exchange."""
        return Group(self.replicas, self._data, watched)

    def send(self, tensor: Tensor, rank: int) -> Pending:
        """See :class:`econmt.parallel.pipeline.plan.Exchange`."""
        work = distributed.isend(tensor, self._first + rank, group=self._between(rank))
        assert work is not None
        return work

    def receive(self, tensor: Tensor, rank: int) -> Pending:
        """See :class:`econmt.parallel.pipeline.plan.Exchange`."""
        work = distributed.irecv(tensor, self._first + rank, group=self._between(rank))
        assert work is not None
        return work

    def _between(self, rank: int) -> Any:
        pair = min(rank, self.rank), max(rank, self.rank)
        return self._pairs.get(pair, self._group)

    def gather(self, tensor: Tensor) -> Gathered:
        """Begins to exchange a tensor; see :class:`econmt_ops.core.gathering.Gather`."""
        return Gathering(tensor.contiguous(), self._group, self.size)

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Gives every stage what the tensor is on that of ``rank``."""
        distributed.broadcast(tensor, self._first + rank, group=self._group)

    def reduce(self, tensor: Tensor, rank: int) -> None:
        """Adds the tensor up over all stages, on that of ``rank``; elsewhere its values are lost."""
        distributed.reduce(tensor, self._first + rank, group=self._group)

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds the tensor up over all stages."""
        distributed.all_reduce(tensor, group=self._group)


class Gathering:
    """A tensor of every stage, on its way; see :class:`econmt_ops.core.gathering.Gathered`."""

    def __init__(self, tensor: Tensor, group: Any, size: int) -> None:
        self._tensor = tensor  # which must live until it has been sent
        self._all = tensor.new_empty(size, *tensor.shape)
        self._work = distributed.all_gather([*self._all.unbind(0)], tensor, group=group, async_op=True)

    def wait(self) -> Tensor:
        """The tensor of every stage (S, ...)."""
        assert self._work is not None
        self._work.wait()
        return self._all


def even_rows(rows: int, size: int, rank: int) -> slice:
    """The rank's share of the rows of a matrix, all as even as can be."""
    return slice(rows * rank // size, rows * (rank + 1) // size)
