"""What a GPU loses to a process, by a device that says what it is told to."""

from __future__ import annotations

import pytest
import torch

from econmt.memory.measure.device_memory import DeviceMemory

MIB = 1 << 20


class Device:
    """A GPU of 1,000 MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 300 * MIB
        self.reserved = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 * MIB - self.taken, 1000 * MIB))


def test_what_the_allocator_has_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    memory = DeviceMemory(torch.device("cuda"))
    assert memory.read() == (300 * MIB, 0, 0)
    device.taken, device.reserved = 450 * MIB, 120 * MIB
    found = memory.read()
    assert found == (300 * MIB, 120 * MIB, 30 * MIB)
    assert found.total == 150 * MIB


def test_what_was_reserved_before_is_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.reserved = 50 * MIB
    memory = DeviceMemory(torch.device("cuda"))
    device.taken, device.reserved = 260 * MIB, 10 * MIB
    assert memory.read() == (250 * MIB, 10 * MIB, 0)


@pytest.mark.cuda
@pytest.mark.alone
def test_a_graph_takes_memory_that_the_allocator_does_not_see() -> None:
    device = torch.device("cuda")
    numbers = torch.ones(8, device=device)
    numbers.add_(1.0)
    memory, graph = DeviceMemory(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20_000):
            numbers.add_(1.0)
    assert memory.read().outside > 0
    del graph
