"""Limits of a GPU on which kernels and memory plans depend."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class DeviceLimits(NamedTuple):
    """Limits of a GPU.

    Attributes:
        multiprocessors: number of multiprocessors, each of which can hold one program of a persistent kernel.
        shared: bytes of shared memory that a program may use.
        capability: CUDA compute capability.
        memory: bytes of the device's memory.
    """

    multiprocessors: int
    shared: int
    capability: tuple[int, int]
    memory: int


H200 = DeviceLimits(132, 232_448, (9, 0), 150_109_880_320)
"""Limits that hold where there is no GPU, as in estimates and in the interpreter."""


@functools.cache
def _of_gpu(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 48 << 10)  # PyTorch for AMD's GPUs has none
    return DeviceLimits(
        properties.multi_processor_count,
        shared,
        (properties.major, properties.minor),
        properties.total_memory,
    )


def limits_of(device: torch.device) -> DeviceLimits:
    """Returns the limits of a device; those of an H200 for a CPU, and without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)
