"""The processes that train one model together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class World:
    """One process alone, for which every exchange with the others is done before it begins.

    Whoever trains asks it: the step adds up gradients, the stream of batches takes the rank's share of each, and rank 0
    alone writes checkpoints. A world of several processes overrides all of it.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
    """

    rank = 0
    size = 1

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Adds each tensor up over all ranks, in place on every rank."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Gives every rank the values of rank 0, in place."""

    def barrier(self) -> None:
        """Waits until every rank has come here."""
