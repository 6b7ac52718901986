"""Coordinates the ranks of a run: stopping together, shares of batches, and gathering of states."""

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

from econmt.budget.planner import MemoryPlan
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.state import TrainingState
from econmt.data.batching.batch import AnyBatch, BatchShape
from econmt.engine.communicator import Communicator, rows_of_share
from econmt.engine.step import TrainingStep
from econmt.errors import InputError
from econmt.training.interrupts import Interrupts
from econmt.training.progress import Progress

SEEN_WITHIN = 30.0
"""Seconds within which all hosts should see a file that one host writes to a shared file system."""

SLOW = 1.5
"""Multiple of the median time above which a rank is called slow."""


def check_shared(folder: ModelFolder, communicator: Communicator) -> None:
    """Checks that all ranks see the model folder that rank 0 has created.

    Raises:
        InputError: Some do not; raised on every rank.
    """
    if communicator.size == 1:
        return
    marker = folder.path / communicator.on_rank_zero(lambda: f".ranks.{secrets.token_hex(8)}.tmp")
    if communicator.is_rank_zero:
        marker.touch()
    deadline = time.monotonic() + SEEN_WITHIN
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        with contextlib.suppress(OSError):  # a network file system refreshes its listing
            any(folder.path.iterdir())
    report: list[Any] = [marker.exists(), socket.gethostname()]
    reports = communicator.gather(report, patient=True)
    if communicator.is_rank_zero:
        marker.unlink()
    blind = [f"rank {rank} ({host})" for rank, (sees, host) in enumerate(reports) if not sees]
    if blind:
        raise InputError(
            f"{folder.path}: {' and '.join(blind)} cannot see the model folder of rank 0 ({reports[0][1]}); put "
            "output and data.prepared in a folder that all hosts share"
        )


class Ranks:
    """Ranks of a run, with its duration as agreed between them; every method is trivial for a single rank."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._communicator = step.communicator
        self._most_rows: Callable[[AnyBatch], int] | None = None
        self._pending_answer: Callable[[], list[int]] | None = None
        self._seconds_sent = self.seconds = 0.0

    def should_stop(self, interrupts: Interrupts, state: TrainingState) -> bool:
        """Returns True, on all ranks alike, if any rank was asked to stop by a signal.

        The answer is that of the previous call: the exchange runs while an update is computed. All clocks are advanced
        to the latest one.
        """
        if self._communicator.size == 1:
            self.seconds = state.seconds
            return interrupts.pending
        self._communicator.note(state.update)
        answer = self._pending_answer
        if answer is not None:
            number, microseconds = answer()
            self.seconds = microseconds / 1e6
            state.seconds += max(0.0, self.seconds - self._seconds_sent)
        self._seconds_sent = state.seconds
        self._pending_answer = self._communicator.all_reduce_max_later(
            interrupts.received or 0, int(self._seconds_sent * 1e6)
        )
        if answer is None:
            number, microseconds = self._pending_answer()
            self.seconds = microseconds / 1e6
        if number:
            interrupts.received = signal.Signals(number)
        return number > 0

    def discard_answer(self) -> None:
        """Makes the next call of :meth:`should_stop` wait for its own exchange."""
        self._pending_answer = None

    def pad_to_largest(
        self, shapes: Sequence[BatchShape], plan: Callable[[], MemoryPlan | None]
    ) -> Callable[[AnyBatch], int]:
        """Makes batches of a shape equally large by padding rows; returns a function that gives the number of rows."""
        largest = {(shape.source, shape.target): shape.rows for shape in shapes}

        def rows(batch: AnyBatch) -> int:
            planned = plan()
            if planned is not None:
                return planned.find(batch).rows
            return rows_of_share(largest.get(batch.positions, 0), self._communicator.replicas)

        self._most_rows = rows
        return rows

    def share(self, batch: AnyBatch) -> AnyBatch:
        """Returns this rank's rows of a batch, with the same shape on every rank."""
        size = self._communicator.replicas
        if size == 1:
            return batch
        rows = rows_of_share(len(batch.indices), size)
        if self._most_rows is not None:
            rows = max(rows, self._most_rows(batch))
        return batch.share(self._communicator.replica, size, rows)

    def carried(self, rows: int) -> dict[str, Tensor]:
        """Gathers the states carried between steps from all ranks, for batches of ``rows`` rows.

        A buffer has a state for each row of the whole batch, starting at index 1, and a rank updates those of its own
        rows.
        """
        buffers = self._step.carried()
        size = self._communicator.replicas
        if size == 1:
            return buffers
        share = rows_of_share(rows, size)
        for buffer in buffers.values():
            for rank in range(size):
                begin, end = 1 + rank * share, 1 + min((rank + 1) * share, rows)
                if begin < end:
                    part = buffer[:, :, begin:end].contiguous()
                    self._communicator.broadcast([part], rank * self._communicator.stages)
                    buffer[:, :, begin:end] = part
        return buffers

    def optimizer_tensors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Returns the optimizer's state by name: of all ranks on rank 0, which saves it; elsewhere the local part."""
        local = self._step.optimizer_tensors()
        shares = self._step.shares
        if shares is None:
            return local
        tensors: dict[str, Tensor] = {}
        described: list[Any] = [
            [name, list(value.shape), str(value.dtype).removeprefix("torch.")]
            for name, value in local.items()
        ]
        listed = self._communicator.gather(described)
        location = {name: (rank, *form) for rank, part in enumerate(listed) for name, *form in part}
        for parameter_name in parameters:
            for name in [each for each in location if each.partition("/")[2] == parameter_name]:
                rank, shape, kind = location[name]
                empty = torch.empty(shape, dtype=getattr(torch, kind))
                value = local[name].cpu() if rank == self._communicator.rank else empty
                self._communicator.broadcast([value], rank)
                if self._communicator.is_rank_zero:
                    tensors[name] = value
        return tensors if self._communicator.is_rank_zero else local

    def report_slow(self, progress: Progress) -> None:
        """Reports a rank that is much slower than the others; all ranks call this now and then."""
        seconds, self._step.seconds = self._step.seconds, 0.0
        if self._communicator.size == 1:
            return
        report: list[Any] = [seconds, socket.gethostname()]
        reports = self._communicator.gather(report)
        median = median_low([spent for spent, _ in reports])
        for rank, (spent, host) in enumerate(reports):
            if spent > SLOW * median:
                progress.note(
                    f"rank {rank} ({host}) is slow: it takes {spent / median:.1f} times the median {median:.2f} s; "
                    "all ranks wait for it"
                )
