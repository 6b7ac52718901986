"""Memory of a GPU outside of PyTorch's allocator."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from econmt.engine import outside_memory
from econmt_memory.measure.ledger import OutsideMemory
from tests import conftest
from tests.conftest import fails_with

GPU = torch.device("cuda:1")


def forget() -> None:
    outside_memory._management.cache_clear()
    outside_memory._meter.cache_clear()


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    """What is known of a GPU and its libraries is not that of other tests."""
    forget()
    yield
    forget()


class Card:
    """GPU of 1,000 bytes; ``taken`` by all processes, ``reserved`` by this one's allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, initialized: bool = False) -> None:
        self.taken, self.reserved, self.limits = 100, 0, list[int]()
        self.own: int | None = None
        cuda = "torch.cuda."
        monkeypatch.setattr(cuda + "is_initialized", lambda: initialized)
        monkeypatch.setattr(cuda + "synchronize", lambda device: self._take(200))
        monkeypatch.setattr(cuda + "device", lambda device: nullcontext())
        monkeypatch.setattr(cuda + "mem_get_info", lambda device: (1000 - self.taken, 1000))
        monkeypatch.setattr(cuda + "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(outside_memory, "taken_by_all", lambda index: self.taken if index == 1 else 0)
        monkeypatch.setattr(outside_memory, "taken_by_process", self._of_process)
        monkeypatch.setattr(outside_memory, "_limit_stacks", self._shrink)
        monkeypatch.setattr(outside_memory, "_use_libraries", lambda device: self._take(50, 20))

    def _of_process(self, index: int, process: int) -> int | None:
        return self.own if (index, process) == (1, os.getpid()) else None

    def _take(self, size: int, reserved: int = 0) -> None:
        self.taken += size + reserved
        self.own = None if self.own is None else self.own + size + reserved
        self.reserved += reserved

    def _shrink(self, size: int) -> None:
        self.limits.append(size)
        self._take(-80)


def test_memory_is_told_apart_by_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    meter = outside_memory.OutsideMeter(GPU)
    assert card.limits == [outside_memory.STACK_BYTES]
    assert meter.read() == OutsideMemory(120, 50, 0)
    card.taken, card.reserved = card.taken + 300 + 7, card.reserved + 300
    assert meter.read() == OutsideMemory(120, 50, 7)
    assert meter.read().total == card.taken - card.reserved - 100
    assert meter.expected() == meter.expected(12) == OutsideMemory(120, 50, outside_memory.ASSUMED.kernels)
    assert meter.expected(40) == OutsideMemory(120, 50, outside_memory.ASSUMED.kernels + 28 * 4_200_000)
    card.taken -= 30  # an earlier kernel is unloaded
    assert meter.read().kernels == 0


@pytest.mark.parametrize("initialized", [False, True])
def test_memory_of_others_does_not_count_where_the_library_tells_each_process(
    monkeypatch: pytest.MonkeyPatch, initialized: bool
) -> None:
    card = Card(monkeypatch, initialized=initialized)
    assert not initialized or outside_memory.OutsideMeter(GPU).read().context == 300, (
        "those of other processes, too"
    )
    assert not card.limits
    card = Card(monkeypatch, initialized=initialized)
    card.own = 0
    meter = outside_memory.OutsideMeter(GPU)
    assert meter.by_process
    assert meter.source == "measured for this process"
    assert meter.read() == OutsideMemory(200 if initialized else 120, 50, 0)
    card.taken += 500  # another process
    card._take(37, 100)
    assert meter.read().kernels == 37
    assert meter.expected().kernels == outside_memory.ASSUMED.kernels
    # In a container other numbers may be seen; memory less than the allocator's is not this process's.
    card.own, card.reserved = 0, 1000
    card.taken += 1000
    meter = outside_memory.OutsideMeter(GPU)
    assert not meter.by_process
    assert meter.source.startswith("measured for all processes of the GPU")


def test_two_readings_agree() -> None:
    readings = iter([7, 9, 8, 8, 5])
    assert outside_memory.agreed(lambda: next(readings)) == 8
    assert next(readings) == 5
    falling = iter(range(20, 0, -1))
    assert outside_memory.agreed(lambda: next(falling)) == 11
    rising = iter(range(20))
    assert outside_memory.agreed(lambda: next(rising)) == 0, "the smallest, not the last"


class Management:
    """NVIDIA's libraries, as far as they are called: the GPU 1 of CUDA has 900 bytes taken, by these processes."""

    def __init__(self, processes: dict[int, int], *, fails: str = "") -> None:
        self._processes, self._fails = list(processes.items()), fails
        if fails == "missing":
            self.nvmlDeviceGetComputeRunningProcesses_v3 = None

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, gpu: Any, index: int) -> int:
        gpu._obj.value = index
        return 0 if index == 1 else 101

    def cuDeviceGetPCIBusId(self, address: Any, length: int, gpu: ctypes.c_int) -> int:
        address.value = b"bus %d" % gpu.value
        return 0

    def nvmlInit_v2(self) -> int:
        return 9 if self._fails == "driver" else 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, handle: Any) -> int:
        handle._obj.value = 77 if address.value == b"bus 1" else 0
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: ctypes.c_void_p, memory: Any) -> int:
        assert handle.value == 77
        memory._obj.used = 900
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, room: Any, entries: Any) -> int:  # type: ignore[no-redef]
        assert handle.value == 77
        enough = room._obj.value >= len(self._processes)
        room._obj.value = len(self._processes)
        if entries is None or not enough:
            return 7
        for number, process in enumerate(self._processes):
            entries[number].pid, entries[number].used = process
        return 3 if self._fails == "refused" else 0


def test_the_management_library_tells_what_a_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {number: number for number in range(100, 140)}
    cases: list[tuple[dict[int, int], str, int | None]] = [
        ({5: 300, 6: 600}, "", 300),
        ({6: 600}, "", None),
        ({5: 2**64 - 1}, "", None),  # the library knows that it is there, not what it takes
        ({}, "", None),
        ({5: 300}, "refused", None),
        ({5: 300}, "missing", None),
        ({5: 300}, "driver", None),
        ({**many, 5: 11}, "", 11),
    ]
    for processes, fails, expected in cases:
        forget()
        library = Management(processes, fails=fails)
        monkeypatch.setattr(outside_memory, "_library", lambda name, library=library: library)
        assert outside_memory.taken_by_process(1, 5) == expected
        assert outside_memory.taken_by_process(0, 5) is None
        assert outside_memory.taken_by_all(1) == (0 if fails == "driver" else 900)


def test_a_gpu_has_one_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, initialized=True)
    monkeypatch.setattr("torch._C._cuda_getDevice", lambda: 1, raising=False)
    assert outside_memory.outside_meter(GPU) is outside_memory.outside_meter(torch.device("cuda"))


def test_without_a_driver_nothing_is_limited_and_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", fails_with(OSError("no such library")))
    outside_memory._limit_stacks(256)
    assert outside_memory.taken_by_all(0) == 0
    assert outside_memory.taken_by_process(0, 1) is None


def test_workspaces_are_small_for_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert outside_memory.workspace_bytes(torch.bfloat16) == 8 * 16 * 1024
    assert outside_memory.workspace_bytes(torch.float32) == 32 << 20
    with monkeypatch.context() as patch:  # PyTorch has read the variable
        Card(patch, initialized=True)
        assert outside_memory.workspace_bytes(torch.bfloat16) == 32 << 20
    outside_memory.limit_workspaces("tf32")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    Card(monkeypatch, initialized=True)
    outside_memory.limit_workspaces("auto")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    Card(monkeypatch)
    ignored = "Requested unified CUBLASLT workspace size of 1048576 bytes exceeds CUBLAS workspace size of 131072 bytes."
    with warnings.catch_warnings(record=True) as told:
        outside_memory.limit_workspaces("auto")
        warnings.warn(ignored, stacklevel=1)
    assert not told
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == outside_memory.WORKSPACE == conftest.WORKSPACE
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    outside_memory.limit_workspaces("bfloat16")
    assert outside_memory.workspace_bytes(torch.float32) == (2 * 4096 + 8 * 16) << 10


@pytest.mark.cuda
def test_a_gpus_memory_is_complete() -> None:
    device = torch.device("cuda:0")
    meter = outside_memory.outside_meter(device)
    free, total = torch.cuda.mem_get_info(device)
    found = meter.read()
    assert found.context > 100 << 20
    assert found.total <= total - free - torch.cuda.memory_reserved(device)


@pytest.mark.cuda
def test_stacks_are_as_deep_as_kernels_need() -> None:
    device, limit = torch.device("cuda:0"), ctypes.c_size_t()
    torch.ones(1, device=device)
    outside_memory._limit_stacks(outside_memory.STACK_BYTES)
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetLimit(ctypes.byref(limit), 0) == 0
    assert limit.value == outside_memory.STACK_BYTES
    numbers = torch.randn(1000, 1000, dtype=torch.float64, device=device)
    torch.testing.assert_close(torch.linalg.inv(numbers) @ numbers, torch.eye(1000, device=device).double())
    torch.testing.assert_close(numbers.sort().values.cpu(), numbers.cpu().sort().values)


@pytest.mark.cuda
def test_the_library_tells_this_process_what_the_meter_finds() -> None:
    device = torch.device("cuda:0")
    kept = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    own = outside_memory.taken_by_process(0, os.getpid())
    free, total = torch.cuda.mem_get_info(device)
    assert own is None or kept.nbytes < own <= total - free


@pytest.mark.cuda
def test_before_a_context_the_management_library_knows_what_is_taken() -> None:
    device = torch.device("cuda:0")
    torch.ones(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    assert abs(outside_memory.taken_by_all(0) - (total - free)) < 32 << 20
