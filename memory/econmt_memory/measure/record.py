"""Record of the live bytes at every moment of a computation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter

import torch

from econmt_memory.measure.storages import Beginning, Change, Hidden, Repetition, Storage, Work


class MemoryRecord:
    """Storages of one device and how their sizes changed, with the operators that ran.

    Args:
        device: Device whose memory counts.

    Attributes:
        before: Storages that existed before the recording, with their sizes then.
        changes: Changes of sizes, in order.
        hidden: Memory that operators used internally, by the number of changes before.
        repetitions: Changes that stand for several equal sequences, in order; outermost ones only.
        begins: Beginnings of phases, in order.
        works: Operators that ran, in order.
        seconds: Seconds of the whole recording.
        flops: Floating-point operations of matrix products, by the type of their factors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: list[tuple[Storage, int]] = []
        self.changes: list[Change] = []
        self.hidden: dict[int, Hidden] = {}
        self.repetitions: list[Repetition] = []
        self.begins: list[Beginning] = []
        self.works: list[Work] = []
        self.seconds = 0.0
        self.flops: Counter[torch.dtype] = Counter()
        self._at_start = 0

    def settle(self) -> None:
        """Completes the record, after the recording."""

    def phase(self) -> str:
        """Returns the current phase."""
        return self.begins[-1].phase if self.begins else "forward"

    @property
    def unknown(self) -> int:
        """Bytes that were allocated at the start and belong to no known storage."""
        return max(0, self._at_start - sum(size for _, size in self.before)) if self._at_start else 0

    def live(self) -> Iterator[int]:
        """Yields the live bytes at the start and after each change, including memory that operators use internally."""
        total = self.unknown + sum(size for _, size in self.before)
        for moment, grown in enumerate(chain([0], (change.size for change in self.changes))):
            total += grown
            hidden = self.hidden.get(moment)
            yield total if hidden is None else total + hidden.size

    def peak(self) -> tuple[int, int]:
        """Returns the most live bytes, and the number of changes before that moment."""
        moment, size = max(enumerate(self.live()), key=itemgetter(1))  # the first of equals
        return size, moment

    def alive(self, moment: int) -> dict[Storage, int]:
        """Returns the storages that are alive after ``moment`` changes, with their bytes."""
        sizes = dict(self.before)
        for change in self.changes[:moment]:
            sizes[change.storage] = sizes.get(change.storage, 0) + change.size
        return {storage: size for storage, size in sizes.items() if size}

    @property
    def precision(self) -> torch.dtype:
        """Type of most floating-point operations."""
        return max(self.flops, key=self.flops.__getitem__, default=torch.float32)


def now(start: int) -> float:
    """Returns the seconds since ``start``, by the clock of the profiler's events."""
    return (time.time_ns() - start) / 1e9
