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
        self._at_start = self._start = 0

    def settle(self) -> None:
        """Completes the record, after the recording."""

    def since(self, nanoseconds: int) -> float:
        """Returns the seconds from the start of the recording to a moment, in nanoseconds of the epoch."""
        return (nanoseconds - self._start) / 1e9

    def now(self) -> float:
        """Returns the seconds since the start of the recording."""
        return self.since(time.time_ns())

    def phase_of(self, layer: str, *, updating: bool, in_backward: bool) -> str:
        """Returns the phase of code in a layer; code between phases, such as clipping, belongs to the one before."""
        if updating or in_backward:
            return "optimizer" if updating else "backward"
        return "forward" if layer != "other" or not self.begins else self.begins[-1].phase

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
