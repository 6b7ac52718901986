"""Memory of a GPU that a process takes outside of PyTorch's allocator: CUDA's context, libraries, kernels and graphs.

CUDA reserves a stack for every thread that a GPU can run at once, by default 1 KB each: 264 MiB of an H100. The driver
enlarges it at the launch of a kernel whose stack the compiler found to be deeper, so a command begins with a small one.

The workspace of cuBLAS, 32 MiB for each thread on a Hopper GPU by default, is inside of the allocator. Products of
16-bit numbers are not slower with 128 KiB; in float32 steps of the recipes would take 3 to 40 % longer.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from econmt.data.batching.bucket_shapes import GRAPH_BYTES
from econmt_memory.estimate.allocator import CUBLAS_VARIABLE, cublas_workspace
from econmt_memory.measure.ledger import OutsideMemory

STACK_BYTES = 256
"""Bytes of stack per thread with which a command begins."""

WORKSPACE = ":16:8"
"""Workspace of cuBLAS with which a command in 16-bit precision begins: eight of 16 KiB, which is also deterministic."""

MIB = 1 << 20

ASSUMED = OutsideMemory(329 * MIB, 158 * MIB, 192 * MIB)
"""Memory that predictions assume, as measured in training on an H100."""
ASSUMED_GRAPHS = 12
"""Number of CUDA graphs in that memory."""


class OutsideMeter:
    """Measures the memory of a GPU outside of PyTorch's allocator.

    Where NVIDIA's management library tells the memory of this process, memory of other processes is not counted.
    Elsewhere, as in many containers, it is what all processes take, less what they took before; two readings that agree
    are needed, because others may allocate at the same time. Then what others allocate later is counted, and what they
    had if CUDA was in use before or the library is missing. Stacks are limited unless CUDA was in use before.

    Attributes:
        by_process: True if the memory of this process alone is measured.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        begins = not cuda.is_initialized()
        self._device, self._others = device, 0
        if begins:
            self._others = agreed(lambda: taken_by_all(device.index))
        torch.cuda.synchronize(device)  # creates the context
        self.by_process = self._own_bytes() is not None
        if begins:
            with torch.cuda.device(device):
                _limit_stacks(STACK_BYTES)
        self._context = self._bytes()
        _use_libraries(device)
        self._libraries = self._bytes() - self._context

    def read(self) -> OutsideMemory:
        """Returns the memory that is taken now."""
        kernels = self._bytes() - self._context - self._libraries
        return OutsideMemory(self._context, self._libraries, max(0, kernels))

    def expected(self, graphs: int = ASSUMED_GRAPHS) -> OutsideMemory:
        """Returns the memory of a run that is about to begin: what is taken, and the kernels that are assumed.

        Args:
            graphs: number of CUDA graphs that the run will capture.
        """
        now = self.read()
        kernels = ASSUMED.kernels + max(0, graphs - ASSUMED_GRAPHS) * GRAPH_BYTES
        return now._replace(kernels=max(now.kernels, kernels))

    @property
    def source(self) -> str:
        """Clause for a message on how the memory is measured."""
        if self.by_process:
            return "measured for this process"
        return "measured for all processes of the GPU, less what they took at the start"

    def _bytes(self) -> int:
        own = self._own_bytes() if self.by_process else None
        if own is None:
            own = agreed(self._bytes_of_all) - self._others
        return max(0, own - torch.cuda.memory_reserved(self._device))

    def _bytes_of_all(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _own_bytes(self) -> int | None:
        """Returns the bytes of this process; None if the library does not tell, or tells less than the allocator has.

        In a container, the library may know the process by another number, which here another process may have.
        """
        own = taken_by_process(self._device.index, os.getpid())
        return None if own is None or own < torch.cuda.memory_reserved(self._device) else own


_READINGS = 10


def agreed(read: Callable[[], int]) -> int:
    """Returns a number of bytes that two readings in a row have in common; if none do, the smallest of ten."""
    readings = [read()]
    for _ in range(_READINGS - 1):
        readings.append(read())
        if readings[-1] == readings[-2]:
            return readings[-1]
    return min(readings)


def limit_workspaces(precision: str) -> None:
    """Gives cuBLAS small workspaces for a precision of 16 bits, unless $CUBLAS_WORKSPACE_CONFIG is set or CUDA in use.

    Args:
        precision: Name of a precision, or auto, which is one of 16 bits on all GPUs with tensor cores.
    """
    cuda: Any = torch.cuda
    if precision not in ("auto", "bfloat16", "float16") or cuda.is_initialized():
        return
    if os.environ.setdefault(CUBLAS_VARIABLE, WORKSPACE) == WORKSPACE:
        # PyTorch 2.11 warns that cuBLASLt, which wants 1 MiB, gets no more than cuBLAS.
        warnings.filterwarnings("ignore", "Requested unified CUBLASLT workspace size")


def workspace_bytes(dtype: torch.dtype) -> int:
    """Returns the bytes of cuBLAS's workspace for a thread of this process or, before it uses CUDA, of a command.

    Args:
        dtype: Type of the command's products.
    """
    cuda: Any = torch.cuda
    small = dtype.itemsize == 2 and not cuda.is_initialized()
    return cublas_workspace(WORKSPACE if small else "")


def outside_meter(device: torch.device) -> OutsideMeter:
    """Returns the meter of a GPU, which begins with the first call: as early as possible in a command."""
    # Other than torch.cuda.current_device(), this does not put CUDA in use.
    return _meter(device.index if ":" in str(device) else torch._C._cuda_getDevice())


@cache
def _meter(index: int) -> OutsideMeter:
    return OutsideMeter(torch.device("cuda", index))


def _use_libraries(device: torch.device) -> None:
    """Loads PyTorch's kernels and cuBLAS."""
    sample = torch.ones(64, 64, device=device, dtype=torch.float16)
    (sample @ sample).sum().item()


def _library(name: str) -> ctypes.CDLL | None:
    """Loads a library of NVIDIA's driver; None if it is missing, as on other systems than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _limit_stacks(size: int) -> None:
    """Sets the stack of each thread in the current context, if it is larger; the driver enlarges it where needed."""
    driver = _library("libcuda.so.1")
    if driver is None:
        return
    stack, current = 0, ctypes.c_size_t()  # CU_LIMIT_STACK_SIZE
    if driver.cuCtxGetLimit(ctypes.byref(current), stack) == 0 and current.value > size:
        driver.cuCtxSetLimit(stack, ctypes.c_size_t(size))


class _DriverMemory(ctypes.Structure):
    """Structure nvmlMemory_v2_t, in bytes."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _ProcessMemory(ctypes.Structure):
    """Structure nvmlProcessInfo_t of the third version of its function, in bytes."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_UNKNOWN_MEMORY = 2**64 - 1
"""Bytes of a process of which the library knows no more than that it is there."""


@cache
def _management(index: int) -> tuple[Any, ctypes.c_void_p] | None:
    """Returns NVIDIA's management library and its handle of a GPU of CUDA; None if one of them is missing."""
    driver, management = _library("libcuda.so.1"), _library("libnvidia-ml.so.1")
    if driver is None or management is None:
        return None
    gpu, handle, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.create_string_buffer(32)
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(gpu), index)
        or driver.cuDeviceGetPCIBusId(address, len(address), gpu)
        or management.nvmlInit_v2()
        or management.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(handle))
    )
    return None if failed else (management, handle)


def taken_by_all(index: int) -> int:
    """Returns the bytes of a GPU that all processes take, without creating a context on it; 0 if unknown."""
    found = _management(index)
    memory = _DriverMemory(version=ctypes.sizeof(_DriverMemory) | 2 << 24)
    if found is None or found[0].nvmlDeviceGetMemoryInfo_v2(found[1], ctypes.byref(memory)):
        return 0
    return int(memory.used)


def taken_by_process(index: int, process: int) -> int | None:
    """Returns the bytes of a GPU that a process takes; None if the management library does not tell."""
    found = _management(index)
    # Drivers before version 510 lack the function.
    read = None if found is None else getattr(found[0], "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if found is None or read is None:
        return None
    room = ctypes.c_uint(0)
    read(found[1], ctypes.byref(room), None)  # tells how many there are
    room.value += 16  # some may begin meanwhile
    entries = (_ProcessMemory * room.value)()
    if read(found[1], ctypes.byref(room), entries):
        return None
    used = [entry.used for entry in entries[: room.value] if entry.pid == process]
    return None if not used or _UNKNOWN_MEMORY in used else sum(used)
