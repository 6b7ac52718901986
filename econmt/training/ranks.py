"""What a run does so that several ranks train as one: agree when to leave, share batches, carry what each one has."""

from __future__ import annotations

import signal
from collections.abc import Callable

from torch import Tensor

from econmt.data.batch import AnyBatch
from econmt.engine.step import TrainingStep
from econmt.engine.world import rows_of_share
from econmt.training.interrupts import Interrupts
from econmt.training.state import TrainingState


class Ranks:
    """The ranks of a run; all that is done here is nothing where there is one.

    Args:
        step: of the run.

    Attributes:
        most_rows: rows that each rank has of batches like one at most, to which its share is filled up; None: as many
            as it has.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._world = step.world
        self.most_rows: Callable[[AnyBatch], int] | None = None

    def told_to_leave(self, interrupts: Interrupts, state: TrainingState) -> bool:
        """Whether any rank was told to leave; from then on all were. All go by the clock of the slowest."""
        if self._world.size == 1:
            return interrupts.pending
        number, microseconds = self._world.largest(interrupts.received or 0, int(state.seconds * 1e6))
        state.seconds = microseconds / 1e6
        if number:
            interrupts.received = signal.Signals(number)
        return number > 0

    def share(self, batch: AnyBatch) -> AnyBatch:
        """This rank's rows of a batch, of the same shape on every rank."""
        size = self._world.replicas
        if size == 1:
            return batch
        rows = rows_of_share(len(batch.indices), size)
        if self.most_rows is not None:
            rows = max(rows, self.most_rows(batch))
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
