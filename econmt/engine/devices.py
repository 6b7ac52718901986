"""Resolves device names, and manages memory and determinism of a device."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from econmt.errors import InputError
from econmt_ops.backends import triton as kernels
from econmt_ops.dispatch.capture import is_out_of_memory as is_out_of_memory
from econmt_ops.dispatch.timing import synchronizer

UNUSED_DEVICES = {
    "mps": "econmt does not use Apple's GPUs; use device cpu or auto",
    "xpu": "econmt does not use Intel's GPUs; use device cpu or auto",
    "hip": "PyTorch's builds for ROCm call AMD's GPUs cuda; use device cuda or auto",
    "rocm": "PyTorch's builds for ROCm call AMD's GPUs cuda; use device cuda or auto",
}
"""Names of devices that PyTorch or a user knows and a recipe cannot have, and what to do."""


def check_device_name(name: str) -> None:
    """Checks that a name is that of a device, which need not exist here.

    Raises:
        InputError: The name is not auto, cpu, cuda or cuda:N.
    """
    kind = name.partition(":")[0]
    if kind in UNUSED_DEVICES:
        raise InputError(f"device '{name[:40]}': {UNUSED_DEVICES[kind]}")
    if re.fullmatch("auto|cpu|cuda(:[0-9]{1,2})?", name) is None:
        raise InputError(f"device '{name[:40]}': unknown; use auto, cpu, cuda or cuda:N")


def resolve_device(name: torch.device | str) -> torch.device:
    """Returns the device that a recipe or an option names: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: There is no such device.
    """
    name = str(name)
    check_device_name(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            available = f"{count} GPUs" if count else "no GPU"
            raise InputError(f"device '{name}': torch sees {available} here; use device cpu or auto")
    return device


def unused_kernels(device: torch.device) -> str | None:
    """Returns a one-line warning if econmt's GPU kernels are not used on a device that is a GPU, else None."""
    why = kernels.why_unused() if device.type == "cuda" else ""
    if not why:
        return None
    return (
        f"econmt's GPU kernels are not used: {why}; its operations run as calls of PyTorch, with the same results and "
        "more slowly"
    )


def trims_batches(wanted: str, device: torch.device) -> bool:
    """Returns True if batches are trimmed to their longest pair; auto does so on a CPU, where new shapes are free."""
    return wanted == "always" or (wanted == "auto" and device.type == "cpu")


@contextlib.contextmanager
def reproducible(device: torch.device, threads: int | None) -> Iterator[None]:
    """Sets deterministic algorithms on a CPU, where they cost nothing, and the recipe's number of threads.

    On a GPU, scattered additions (the gradient of an embedding) stay fast and nondeterministic, so two runs agree up to
    rounding only.
    """
    switches: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        switches.fill_uninitialized_memory,
        torch.get_num_threads(),
    )
    if device.type == "cpu":
        _set_deterministic(True)
        switches.fill_uninitialized_memory = False  # filling every new tensor would be slow
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        _set_deterministic(before[0], warn_only=before[1])
        switches.fill_uninitialized_memory = before[2]
        if threads is not None:
            torch.set_num_threads(before[3])


def _set_deterministic(mode: bool, *, warn_only: bool = False) -> None:
    """Does what torch.use_deterministic_algorithms does to eager operators, without importing the compiler."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def _malloc_trim() -> Callable[[int], int] | None:
    """Returns the C library's ``malloc_trim``, or None if it has none."""
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return function


_TRIM = _malloc_trim()


def give_back_memory(device: torch.device) -> None:
    """Returns memory of freed tensors, which the C library keeps for reuse, to the operating system.

    Batches have many shapes, and a new tensor seldom fits exactly into the space of an old one, so that the unused
    memory grows by hundreds of megabytes. A call takes some milliseconds.
    """
    if _TRIM is not None and device.type == "cpu":
        _TRIM(0)


_LARGE_LIBRARY = 4 << 20
_MADV_DONTNEED = 4


def give_back_library_pages() -> None:
    """Drops the resident code pages of large libraries that only loading needed; the system reloads pages on demand.

    Of the 330 MB of code in PyTorch's library, 70 MB are touched while it registers its operators and about 10 MB
    later. Code pages are read-only and stay in the system's file cache, so nothing is lost.
    """
    if not sys.platform.startswith("linux"):
        return
    advise = ctypes.CDLL(None).madvise
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    mapped = [line.split(maxsplit=5) for line in maps.splitlines()]
    for addresses, permissions, _, _, node, *_ in mapped:
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if permissions == "r-xp" and node != "0" and end - begin >= _LARGE_LIBRARY:
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Returns the duration of a call, including its work on a GPU."""
    synchronize = synchronizer(device)
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def shortest_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns the duration of the fastest of several calls, after a warm-up call that does not count."""
    run()
    return min(seconds_of(run, device) for _ in range(repeats))


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes: of PyTorch's tensors on a GPU, of the resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":  # Windows has no getrusage
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
