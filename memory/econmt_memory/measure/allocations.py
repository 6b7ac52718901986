"""Allocations and releases of memory, as PyTorch's allocators report them to its profiler.

They include memory that no operator returns, such as a weight that oneDNN reorders.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from econmt_memory.measure.patches import patched

OUTSIDE = "code without operators"
"""Maker of memory that was allocated while no operator ran, as in a compiled function."""


_RECORDING = threading.Lock()
"""Held while a log records: PyTorch's profiler crashes if two threads run it, and records one thread alone."""


def another_thread_records() -> bool:
    """Returns True if a log of another thread records."""
    return _RECORDING.locked() and not torch._C._autograd._profiler_enabled()


class Allocation(NamedTuple):
    """Allocation of ``size`` bytes at an address (release if negative), ``seconds`` after the start."""

    seconds: float
    address: int
    size: int


class AllocationLog:
    """Record of the profiler: what was allocated and released and, with ``operators``, which operators ran.

    Args:
        operators: True if operators are recorded with the shapes and addresses of their tensors.

    Attributes:
        result: Result of the profiler; None if nothing was recorded.
    """

    def __init__(self, *, operators: bool = False) -> None:
        self.result: Any = None
        self._operators = operators

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what is allocated and released within the context; records nothing if a profiler runs already."""
        # Bound here, since torch has no such names without its profiler.
        from torch._C import _profiler as profiler

        autograd = torch._C._autograd
        if autograd._profiler_enabled() or not _RECORDING.acquire(blocking=False):
            yield
            return
        activities = {profiler.ProfilerActivity.CPU}
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.KINETO,
            self._operators,
            True,
            False,
            False,
            False,
            # Operators are not brought together with kernels of a GPU, which the profiler does not record here.
            profiler._ExperimentalConfig(disable_external_correlation=True),
        )
        # No operator has the scope of the lite interpreter, so that memory events remain.
        scopes = () if self._operators else ({profiler.RecordScope.LITE_INTERPRETER},)
        try:
            with _quiet():
                autograd._prepare_profiler(config, activities)
                autograd._enable_profiler(config, activities, *scopes)
            try:
                with _without_warnings():
                    yield
            finally:
                with _quiet():
                    self.result = autograd._disable_profiler()
        finally:
            _RECORDING.release()

    @contextmanager
    def range(self) -> Iterator[None]:
        """Records a range, since the profiler leaves out what happens to a GPU's memory outside of all ranges."""
        from torch._C import _profiler as profiler

        with profiler._RecordFunctionFast("econmt_memory"):
            yield

    @property
    def has_events(self) -> bool:
        """True if the log has recorded."""
        return self.result is not None

    def events(self, start: int) -> list[Allocation]:
        """Returns a CPU's events in order; ``start``: beginning of the record, from ``time.time_ns``."""
        events = []
        waiting = list(self.result.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting += event.children
            if event.tag.name == "Allocation":
                fields = event.extra_fields
                if fields.device.type == "cpu":
                    seconds = (event.start_time_ns - start) / 1e9
                    events.append(Allocation(seconds, fields.ptr, fields.alloc_size))
        self.result = None
        return sorted(events, key=attrgetter("seconds"))


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
    with patched(level, value=max(level.value, 2)):
        yield


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
