"""Ranks of a pipeline, and communication between its stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, distributed

from econmt.parallel.groups import Group, Pending, started


class Stages(Group):
    """Ranks that hold one model together, one pipeline stage each.

    With N processes in pipelines of S stages, rank g is stage g % S of replica g // S: the stages of a replica, which
    communicate most, are neighbours. All processes create this together, as they create process groups.

    Args:
        size: S, which divides the number of processes; the default process group exists.
        device: Device of the tensors: NCCL connects GPUs, gloo connects CPUs.
        timeout: Timeout of an operation; None: torch's default.

    Attributes:
        size: S.
        rank: Stage of this process.
        replica, replicas: Replica that it belongs to, and number of replicas.
    """

    def __init__(self, size: int, device: torch.device, timeout: timedelta | None = None) -> None:
        processes, rank = distributed.get_world_size(), distributed.get_rank()
        self.replicas = processes // size
        self.replica, self.rank = divmod(rank, size)
        self._first = self.replica * size
        gpu = device.type == "cuda"
        backend = "nccl" if gpu else "gloo"

        def group(ranks: range) -> Any:
            return distributed.new_group([*ranks], backend=backend, timeout=timeout)

        groups = [group(range(first, first + size)) for first in range(0, processes, size)]
        super().__init__(size, groups[self.replica])
        self._data = [group(range(stage, processes, size)) for stage in range(size)][self.rank]
        # NCCL may run a group's operations one after the other, so each pair of stages gets its own group.
        self._pairs: dict[tuple[int, int], Any] = {}
        for first in range(0, processes, size) if gpu else ():
            for low, high in combinations(range(size), 2):
                pair = group(range(first + low, first + high + 1, high - low))
                if first == self._first:
                    self._pairs[low, high] = pair
        if gpu:
            self._connect(torch.zeros(1, device=device))

    def _connect(self, tensor: Tensor) -> None:
        """Opens all NCCL connections, which is not possible during the capture of a CUDA graph."""
        for group in (self._group, self._data):
            distributed.all_reduce(tensor, group=group)
        for low, high in self._pairs:
            if self.rank == low:
                self.send(tensor, high).wait()
            elif self.rank == high:
                self.receive(tensor, low).wait()

    def of_replicas(self, watched: Callable[[], AbstractContextManager[None]]) -> Group:
        """Returns the group of ranks with this stage, one per replica; ``watched``: context of their collectives."""
        return Group(self.replicas, self._data, watched)

    def send(self, tensor: Tensor, rank: int) -> Pending:
        """Starts to send a tensor, which must not change until that is done, to a stage."""
        return started(distributed.isend(tensor, self._first + rank, group=self._between(rank)))

    def receive(self, tensor: Tensor, rank: int) -> Pending:
        """Starts to receive a tensor from a stage."""
        return started(distributed.irecv(tensor, self._first + rank, group=self._between(rank)))

    def _between(self, rank: int) -> Any:
        pair = min(rank, self.rank), max(rank, self.rank)
        return self._pairs.get(pair, self._group)


def even_rows(rows: int, size: int, rank: int) -> slice:
    """Returns the rank's share of a matrix's rows, divided as evenly as possible."""
    return slice(rows * rank // size, rows * (rank + 1) // size)
