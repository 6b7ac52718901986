"""What a run does so that several ranks train as one: agree when to leave, share batches, carry what each one has."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from econmt.data.batch import AnyBatch, BatchShape
from econmt.engine.step import TrainingStep
from econmt.engine.world import rows_of_share
from econmt.memory.plan.planner import Plan
from econmt.training.interrupts import Interrupts
from econmt.training.progress import Progress
from econmt.training.state import TrainingState

SLOW = 1.5
"""How many times the time of the one in the middle a rank takes that is called slow."""


class Ranks:
    """The ranks of a run; all that is done here is nothing where there is one.

    Args:
        step: of the run.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._world = step.world
        self._most_rows: Callable[[AnyBatch], int] | None = None

    def told_to_leave(self, interrupts: Interrupts, state: TrainingState) -> bool:
        """Whether any rank was told to leave; from then on all were. All go by the clock of the slowest."""
        if self._world.size == 1:
            return interrupts.pending
        self._world.note(state.update)
        number, microseconds = self._world.largest(interrupts.received or 0, int(state.seconds * 1e6))
        state.seconds = microseconds / 1e6
        if number:
            interrupts.received = signal.Signals(number)
        return number > 0

    def fill_up(
        self, shapes: Sequence[BatchShape], plan: Callable[[], Plan | None]
    ) -> Callable[[AnyBatch], int]:
        """From now on batches of a shape have as many rows as any, those that are too few filled up; returns how many.

        Args:
            shapes: of batches.
            plan: of the run's byte budget, as it stands.
        """
        most = {(shape.source, shape.target): shape.rows for shape in shapes}

        def rows(batch: AnyBatch) -> int:
            planned = plan()
            if planned is not None:
                return planned.find(batch).rows
            return rows_of_share(most.get(batch.positions, 0), self._world.replicas)

        self._most_rows = rows
        return rows

    def share(self, batch: AnyBatch) -> AnyBatch:
        """This rank's rows of a batch, of the same shape on every rank."""
        size = self._world.replicas
        if size == 1:
            return batch
        rows = rows_of_share(len(batch.indices), size)
        if self._most_rows is not None:
            rows = max(rows, self._most_rows(batch))
        return batch.share(self._world.replica, size, rows)

    def carried(self, rows: int) -> dict[str, Tensor]:
        """What a step hands to the next one, with the rows that each rank has of a batch of so many.

        A buffer has a state for each row of the whole batch, from the second on, and a rank that of its own.
        """
        found = self._step.carried()
        size = self._world.replicas
        if size == 1:
            return found
        share = rows_of_share(rows, size)
        for buffer in found.values():
            for rank in range(size):
                begin, end = 1 + rank * share, 1 + min((rank + 1) * share, rows)
                if begin < end:
                    part = buffer[:, :, begin:end].contiguous()
                    self._world.broadcast([part], rank * self._world.stages)
                    buffer[:, :, begin:end] = part
        return found

    def optimizer_tensors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The optimizer's state by name: on rank 0, which saves it, all of it, wherever it is; else what is there."""
        own = self._step.optimizer_tensors()
        shares = self._step.shares
        if shares is None:
            return own
        found: dict[str, Tensor] = {}
        described: list[Any] = [[name, list(value.shape)] for name, value in own.items()]
        listed = self._world.gather(described)
        there = {name: (rank, shape) for rank, part in enumerate(listed) for name, shape in part}
        for parameter_name in parameters:
            for name in [each for each in there if each.partition("/")[2] == parameter_name]:
                rank, shape = there[name]
                value = own[name].cpu() if rank == self._world.rank else torch.empty(shape)
                self._world.broadcast([value], rank)
                if self._world.writes:
                    found[name] = value
        return found if self._world.writes else own

    def name_slow(self, progress: Progress) -> None:
        """Tells of a rank that takes much longer than the others; to be called by all, now and then."""
        seconds, self._step.seconds = self._step.seconds, 0.0
        if self._world.size == 1:
            return
        own: list[Any] = [seconds, socket.gethostname()]
        found = self._world.gather(own)
        usual = median_low([each for each, _ in found])
        for rank, (each, host) in enumerate(found):
            if each > SLOW * usual:
                progress.note(
                    f"rank {rank} ({host}) is slow: all wait for it, {each / usual:.1f} times the {usual:.2f} s that "
                    "the rank in the middle takes"
                )
