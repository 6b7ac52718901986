"""Devices: selection, memory, determinism."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from econmt.errors import InputError


def check_device_name(name: str) -> None:
    """Makes sure that a text names a device, whether it is there or not.

    Raises:
        InputError: it names none.
    """
    if re.fullmatch("auto|cpu|cuda(:[0-9]{1,2})?", name) is None:
        raise InputError(f"device '{name[:40]}': unknown; give auto, cpu, cuda or cuda:N")


def resolve_device(name: str) -> torch.device:
    """The device that a recipe or an option names: auto, cpu, cuda or cuda:N.

    Raises:
        InputError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device_name(name)
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"{count} GPUs" if count else "no GPU"
            raise InputError(f"device '{name}': torch sees {found} here; give device cpu or auto")
    return device


_ALLOCATION_FAILED = (
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "could not create a primitive",
    "could not initialize a memory object",
)
"""Messages of PyTorch for full memory where it has no error type for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error says that the device or the machine has no memory left."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or "primitive descriptor" in str(
        error
    ):  # that says "not implemented"
        return False
    return any(words in str(error) for words in _ALLOCATION_FAILED)


def trims_batches(wanted: str, device: torch.device) -> bool:
    """Returns True if batches are cut to their own longest pair; auto does so on the CPU, where a new shape is free."""
    return wanted == "always" or (wanted == "auto" and device.type == "cpu")


@contextlib.contextmanager
def reproducible(device: torch.device, threads: int | None) -> Iterator[None]:
    """Deterministic algorithms on the CPU, where they cost nothing, and the recipe's number of threads.

    On a GPU, scattered additions (the gradient of an embedding) stay as fast as they are, so two runs there agree to
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
        switches.fill_uninitialized_memory = False  # a fill of every new tensor is what would cost
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
    """Does what `torch.use_deterministic_algorithms` does for eager operators, without importing the compiler."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def _malloc_trim() -> Callable[[int], int] | None:
    """The C library's function of that name; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


_TRIM = _malloc_trim()


def give_back_memory(device: torch.device) -> None:
    """Gives the system the pages of freed tensors that the C library keeps for later ones.

    Batches are of many shapes, and tensors of one seldom fit exactly where those of another were: what is free but kept
    grows by hundreds of megabytes. It takes some milliseconds.
    """
    if _TRIM is not None and device.type == "cpu":
        _TRIM(0)


_LARGE_LIBRARY = 4 << 20
_MADV_DONTNEED = 4


def give_back_library_pages() -> None:
    """Lets go of the code of large libraries that only their loading needed; what is needed again is mapped again.

    Of the 330 MB of code in PyTorch's library 70 are touched while it registers its operators, and some 10 later. Code
    is never written to, so that nothing is lost: the pages stay in the system's cache of files.
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


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on the GPU, or the largest resident set of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":  # no such call there
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
