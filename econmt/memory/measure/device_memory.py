"""GPU memory of a process outside of PyTorch's allocator: the context and captured graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeviceBytes(NamedTuple):
    """GPU memory taken by a process.

    Attributes:
        context: taken when counting began, what the allocator had reserved left aside: CUDA's context, libraries, and
            what other processes on the device had taken by then.
        reserved: by PyTorch's caching allocator, the pools of captured graphs included.
        outside: taken since then and not by the allocator: nodes of captured graphs, kernels that were loaded, what
            libraries took. What other processes take meanwhile counts here too.
    """

    context: int
    reserved: int
    outside: int

    @property
    def total(self) -> int:
        """Everything but the context."""
        return self.reserved + self.outside


class DeviceMemory:
    """Counts what is taken from a GPU from now on.

    Args:
        device: of CUDA; it gets its context here if it has none yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._context = self._unreserved()

    def read(self) -> DeviceBytes:
        """Returns the memory taken now; waits for the device."""
        outside = self._unreserved() - self._context
        return DeviceBytes(self._context, torch.cuda.memory_reserved(self._device), outside)

    def _unreserved(self) -> int:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free) - torch.cuda.memory_reserved(self._device)
