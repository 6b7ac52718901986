"""Allocations and releases of memory, as PyTorch's allocators report them to its profiler.

They include memory that no operator returns, such as a weight that oneDNN reorders.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from econmt_memory.measure.patches import patched

OUTSIDE = "code without operators"
"""Maker of memory that was allocated while no operator ran, as in a compiled function."""


_RECORDING = threading.Lock()
"""Held while a log records: PyTorch's profiler crashes if two threads run it, and records one thread alone."""


def profiler_is_free() -> bool:
    """Returns True if PyTorch's profiler, of which there is one, records nothing."""
    return not _RECORDING.locked() and not torch._C._autograd._profiler_enabled()


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Records what is allocated and released within the context, and by which operators.

    The result of the profiler is added to the list after the context, unless a profiler ran already.
    """
    found: list[Any] = []
    # Bound here, since torch has no such names without its profiler.
    from torch._C import _profiler as profiler

    autograd = torch._C._autograd
    if autograd._profiler_enabled() or not _RECORDING.acquire(blocking=False):
        yield found
        return
    activities = {profiler.ProfilerActivity.CPU}
    # Operators are not brought together with kernels of a GPU, which the profiler does not record here.
    experimental = profiler._ExperimentalConfig(disable_external_correlation=True)
    settings = True, True, False, False, False, experimental  # shapes and addresses of tensors, and memory
    config = profiler.ProfilerConfig(profiler.ProfilerState.KINETO, *settings)
    try:
        with _quiet():
            autograd._prepare_profiler(config, activities)
            autograd._enable_profiler(config, activities)
        try:
            # The profiler leaves out what happens to a GPU's memory outside of all ranges.
            refused = patched(torch.autograd.profiler, _prepare_profiler=_refuse, _enable_profiler=_refuse)
            with _without_warnings(), refused, profiler._RecordFunctionFast("econmt_memory"):
                yield found
        finally:
            with _quiet():
                found.append(autograd._disable_profiler())
    finally:
        _RECORDING.release()


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("memory.track: the block cannot use PyTorch's profiler, which makes the account")


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
