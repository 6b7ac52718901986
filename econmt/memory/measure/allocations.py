"""Allocations and releases of a CPU's memory, as PyTorch's allocator reports them to its profiler.

The log hears of memory that no operator returns, such as a weight that oneDNN reorders. It asks the profiler for
memory events alone, which cost about three microseconds each. A GPU's allocator reports nothing to it.
"""

from __future__ import annotations

import ctypes
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from econmt.memory.measure.storages import Change, Sighting, Storage, Work


class Allocation(NamedTuple):
    """Allocation of ``size`` bytes at an address (release if negative), ``seconds`` after the start."""

    seconds: float
    address: int
    size: int


class AllocationLog:
    """Record of the allocations of a CPU's memory."""

    def __init__(self) -> None:
        self._result: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what is allocated and released within the context; records nothing if a profiler runs already."""
        # Bound here, since torch has no such names without its profiler.
        from torch._C import _profiler as profiler

        autograd = torch._C._autograd
        if autograd._profiler_enabled():
            yield
            return
        activities = {profiler.ProfilerActivity.CPU}
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.KINETO, False, True, False, False, False, profiler._ExperimentalConfig()
        )
        with _quiet():
            autograd._prepare_profiler(config, activities)
            # No operator has this scope, so that memory events remain.
            autograd._enable_profiler(config, activities, {profiler.RecordScope.LITE_INTERPRETER})  # type: ignore[call-arg]
        try:
            with _without_warnings():
                yield
        finally:
            with _quiet():
                self._result = autograd._disable_profiler()

    @property
    def has_events(self) -> bool:
        """True if the log has recorded."""
        return self._result is not None

    def events(self, start: int) -> list[Allocation]:
        """Returns the events in order; ``start``: beginning of the record, from ``time.time_ns``."""
        events = []
        waiting = list(self._result.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting += event.children
            if event.tag.name == "Allocation":
                fields = event.extra_fields
                if fields.device.type == "cpu":
                    seconds = (event.start_time_ns - start) / 1e9
                    events.append(Allocation(seconds, fields.ptr, fields.alloc_size))
        self._result = None
        return sorted(events, key=attrgetter("seconds"))


class _Block:
    """Allocated memory from ``begin`` until it is released."""

    def __init__(self, begin: float, size: int) -> None:
        self.begin, self.end, self.size = begin, float("inf"), size
        self.storage: Storage | None = None


def attribute(
    events: Sequence[Allocation],
    sightings: Iterable[Sighting],
    works: Sequence[Work],
) -> tuple[list[Change], set[Storage]]:
    """Attributes allocations to the storages that a tracker has seen in them.

    An allocation without a storage is memory that an operator used internally, or that code without operators, such as
    a compiled function, has made; it belongs to the operator that ran last.

    Args:
        events: Allocations and releases in order.
        sightings: Storages at their addresses, in order.
        works: Operators that ran, in order.

    Returns:
        The changes of sizes, and the storages whose memory was allocated within the record.
    """
    blocks: dict[int, list[_Block]] = {}
    stream: list[tuple[Allocation, _Block]] = []
    for event in events:
        there = blocks.setdefault(event.address, [])
        if event.size > 0:
            there.append(_Block(event.seconds, event.size))
            stream.append((event, there[-1]))
        elif there and there[-1].end == float("inf"):
            there[-1].end = event.seconds
            stream.append((event, there[-1]))
    made = _assign(blocks, sightings, works)
    changes: list[Change] = []
    for event, block in stream:
        if _is_second_scalar(block, works):
            continue
        if block.storage is None:
            block.storage = Storage(block.size, (block.size,), torch.uint8, "", "other", event.address)
            _complete(block.storage, block, works)
        changes.append(Change(event.seconds, block.storage, event.size))
    return changes, made


def _assign(
    blocks: Mapping[int, list[_Block]], sightings: Iterable[Sighting], works: Sequence[Work]
) -> set[Storage]:
    """Assigns storages to blocks; returns those that are not older than the log."""
    made: set[Storage] = set()
    seen: set[Storage] = set()
    for seconds, address, storage in sightings:
        there = blocks.get(address, [])
        index = bisect_right(there, seconds, key=attrgetter("begin"))
        block = there[index - 1] if index else None
        if block is not None and seconds <= block.end:
            if storage not in seen:
                made.add(storage)
            block.storage = block.storage or storage
            if not storage.operator and storage in made:
                _complete(storage, block, works)
        seen.add(storage)
    return made


def _is_second_scalar(block: _Block, works: Sequence[Work]) -> bool:
    """Returns True if a block holds a number that an operator received as a tensor.

    The tracker receives it as a number again, so that the operator that it calls makes a tensor of it once more, which
    an untracked program does not.
    """
    if block.size > _SCALAR or block.storage is not None:
        return False
    index = bisect_right(works, block.begin, key=attrgetter("begin"))
    return (not index or works[index - 1].end < block.begin) and (
        index < len(works) and works[index].end <= block.end < float("inf")
    )


_SCALAR = 16
"""Bytes of the largest number, a complex one."""

OUTSIDE = "code without operators"
"""Maker of memory that was allocated while no operator ran, as in a compiled function."""


def _complete(storage: Storage, block: _Block, works: Sequence[Work]) -> None:
    """Sets the operator and the layer of a storage that was not seen as the result of an operator."""
    index = bisect_right(works, block.begin, key=attrgetter("begin"))
    work = works[index - 1] if index else None
    storage.operator = work.operator if work is not None and block.begin <= work.end else OUTSIDE
    storage.layer = "other" if work is None else work.layer


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides the allocator's warnings about memory that is older than the log, which a tracker knows itself."""
    try:
        level = ctypes.c_int.in_dll(
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "FLAGS_caffe2_log_level"
        )
    except (OSError, ValueError):  # another system, or a torch without this variable
        yield
        return
    before, level.value = level.value, max(level.value, 2)
    try:
        yield
    finally:
        level.value = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the profiler of torch 2.13 from writing to standard error that it starts and stops."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def now(start: int) -> float:
    """Returns the seconds since ``start``, by the clock of the profiler's events."""
    return (time.time_ns() - start) / 1e9
