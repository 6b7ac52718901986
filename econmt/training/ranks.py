"""Coordination of several ranks: agreeing when to stop, sharing batches, and carrying states from step to step."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.state import TrainingState
from econmt.data.batching.batch import AnyBatch, BatchShape
from econmt.engine.communicator import Communicator, rows_of_share
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.memory.plan.planner import MemoryPlan
from econmt.training.interrupts import Interrupts
from econmt.training.progress import Progress

SEEN_WITHIN = 30.0
"""Seconds in which what one host writes is seen by the others, where they share a file system."""

SLOW = 1.5
"""Factor over the median time from which a rank is called slow."""


def check_shared(folder: ModelFolder, communicator: Communicator) -> None:
    """Makes sure that all ranks see the model folder that rank 0 has made.

    Raises:
        InputError: some do not, on every rank.
    """
    if communicator.size == 1:
        return
    sign = folder.path / communicator.on_rank_zero(lambda: f".ranks.{secrets.token_hex(8)}.tmp")
    if communicator.is_rank_zero:
        sign.touch()
    until = time.monotonic() + SEEN_WITHIN
    while not sign.exists() and time.monotonic() < until:
        time.sleep(0.05)
        with contextlib.suppress(OSError):  # a file system of the network looks anew
            any(folder.path.iterdir())
    own: list[Any] = [sign.exists(), socket.gethostname()]
    found = communicator.gather(own, patient=True)
    if communicator.is_rank_zero:
        sign.unlink()
    blind = [f"rank {rank} ({host})" for rank, (sees, host) in enumerate(found) if not sees]
    if blind:
        raise InputError(
            f"{folder.path}: {' and '.join(blind)} cannot see the model folder of rank 0 ({found[0][1]}); give "
            "an output, and data.prepared, in a folder that all hosts share"
        )


class Ranks:
    """The ranks of a run; all that is done here is nothing where there is one.

    Args:
        step: of the run.

    Attributes:
        seconds: how long the run has taken, as all ranks have agreed.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._communicator = step.communicator
        self._most_rows: Callable[[AnyBatch], int] | None = None
        self._asked: Callable[[], list[int]] | None = None
        self._then = self.seconds = 0.0

    def told_to_leave(self, interrupts: Interrupts, state: TrainingState) -> bool:
        """Returns True if any rank was told to stop and all ranks know it.

        What is asked now is known at the next call: the question travels while an update is computed. All clocks are
        put forward to that of the slowest rank.
        """
        if self._communicator.size == 1:
            self.seconds = state.seconds
            return interrupts.pending
        self._communicator.note(state.update)
        answer = self._asked
        if answer is not None:
            number, microseconds = answer()
            self.seconds = microseconds / 1e6
            state.seconds += max(0.0, self.seconds - self._then)
        self._then = state.seconds
        self._asked = self._communicator.all_reduce_max_later(interrupts.received or 0, int(self._then * 1e6))
        if answer is None:
            number, microseconds = self._asked()
            self.seconds = microseconds / 1e6
        if number:
            interrupts.received = signal.Signals(number)
        return number > 0

    def ask_anew(self) -> None:
        """Lets all ranks wait at the next call of :meth:`told_to_leave` for what is asked there."""
        self._asked = None

    def fill_up(
        self, shapes: Sequence[BatchShape], plan: Callable[[], MemoryPlan | None]
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
            return rows_of_share(most.get(batch.positions, 0), self._communicator.replicas)

        self._most_rows = rows
        return rows

    def share(self, batch: AnyBatch) -> AnyBatch:
        """This rank's rows of a batch, of the same shape on every rank."""
        size = self._communicator.replicas
        if size == 1:
            return batch
        rows = rows_of_share(len(batch.indices), size)
        if self._most_rows is not None:
            rows = max(rows, self._most_rows(batch))
        return batch.share(self._communicator.replica, size, rows)

    def carried(self, rows: int) -> dict[str, Tensor]:
        """Returns the state carried to the next step, for this rank's rows of a batch.

        A buffer has a state for each row of the whole batch, from the second on, and a rank that of its own.
        """
        found = self._step.carried()
        size = self._communicator.replicas
        if size == 1:
            return found
        share = rows_of_share(rows, size)
        for buffer in found.values():
            for rank in range(size):
                begin, end = 1 + rank * share, 1 + min((rank + 1) * share, rows)
                if begin < end:
                    part = buffer[:, :, begin:end].contiguous()
                    self._communicator.broadcast([part], rank * self._communicator.stages)
                    buffer[:, :, begin:end] = part
        return found

    def optimizer_tensors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The optimizer's state by name: on rank 0, which saves it, all of it, wherever it is; else what is there."""
        own = self._step.optimizer_tensors()
        shares = self._step.shares
        if shares is None:
            return own
        found: dict[str, Tensor] = {}
        described: list[Any] = [
            [name, list(value.shape), str(value.dtype).removeprefix("torch.")] for name, value in own.items()
        ]
        listed = self._communicator.gather(described)
        there = {name: (rank, *found) for rank, part in enumerate(listed) for name, *found in part}
        for parameter_name in parameters:
            for name in [each for each in there if each.partition("/")[2] == parameter_name]:
                rank, shape, kind = there[name]
                empty = torch.empty(shape, dtype=getattr(torch, kind))
                value = own[name].cpu() if rank == self._communicator.rank else empty
                self._communicator.broadcast([value], rank)
                if self._communicator.is_rank_zero:
                    found[name] = value
        return found if self._communicator.is_rank_zero else own

    def name_slow(self, progress: Progress) -> None:
        """Tells of a rank that takes much longer than the others; to be called by all, now and then."""
        seconds, self._step.seconds = self._step.seconds, 0.0
        if self._communicator.size == 1:
            return
        own: list[Any] = [seconds, socket.gethostname()]
        found = self._communicator.gather(own)
        usual = median_low([each for each, _ in found])
        for rank, (each, host) in enumerate(found):
            if each > SLOW * usual:
                progress.note(
                    f"rank {rank} ({host}) is slow: all wait for it, {each / usual:.1f} times the {usual:.2f} s that "
                    "the rank in the middle takes"
                )
