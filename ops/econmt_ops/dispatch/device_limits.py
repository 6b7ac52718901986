"""Limits of a GPU on which kernels and memory plans depend, and the GPU on which kernels are launched."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
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


def on_gpu_of(values: Iterable[object]) -> AbstractContextManager[object]:
    """Returns a context in which the GPU of the first tensor or device among these that is on one is the current GPU.

    Triton launches kernels on the current GPU, wherever their tensors are.
    """
    for value in values if torch.cuda.is_initialized() else ():  # type: ignore[no-untyped-call]
        device = value if isinstance(value, torch.device) else getattr(value, "device", None)
        if isinstance(device, torch.device) and device.type == "cuda":
            is_current = device.index in (None, torch.cuda.current_device())
            return nullcontext() if is_current else torch.cuda.device(device)
    return nullcontext()
