"""Limits of a GPU on which kernels and memory plans depend, and smaller cards that are played on a larger one.

The environment variable `VARIABLE`, or the context `playing`, makes a process keep to the limits of a smaller card:

    ECONMT_DEVICE_LIMITS="capability=8.6,multiprocessors=24,shared=99KiB,memory=8GiB" econmt train ...

Kernels are then chosen and divided as on that card, persistent launches have no more programs than it has
multiprocessors, and PyTorch's allocator stops at its memory. Programs that do not wait for each other, and the products
of cuBLAS, still run on all multiprocessors of the real card. On a machine without a GPU, estimates follow the limits.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from econmt_ops.dispatch.plans import forget_plans

VARIABLE = "ECONMT_DEVICE_LIMITS"
"""Environment variable with the limits of a smaller card; it is read once."""


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

    def within(self, others: Mapping[str, Any]) -> DeviceLimits:
        """Returns the lower one of each limit, and the other capability; ``others`` by name of the attribute."""
        lower = {
            name: min(getattr(self, name), limit) for name, limit in others.items() if name != "capability"
        }
        return self._replace(**lower, capability=others.get("capability", self.capability))


H200 = DeviceLimits(132, 232_448, (9, 0), 150_109_880_320)
"""Limits that hold where there is no GPU, as in estimates and in the interpreter."""

SHARED = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}
"""KiB of shared memory that a program may use, by compute capability (CUDA C++ Programming Guide, table of technical
specifications per compute capability)."""

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_played: Mapping[str, Any] | None = None
"""Limits of the context `playing`; None outside of it."""


def parse(text: str) -> dict[str, Any]:
    """Returns limits that are written as name=value, separated by commas; see the module.

    Without ``shared``, a capability implies the shared memory of its cards.

    Raises:
        ValueError: A name or a value is unknown.
    """
    limits: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        version = re.fullmatch(r"(\d{1,2})\.(\d)", value)
        size = re.fullmatch(r"([1-9]\d{0,14})(KiB|MiB|GiB|)", value)
        if name == "capability" and version:
            limits[name] = int(version[1]), int(version[2])
        elif (
            name in ("shared", "memory", "multiprocessors")
            and size
            and (name != "multiprocessors" or not size[2])
        ):
            limits[name] = int(size[1]) * _UNITS[size[2]]
        else:
            raise ValueError(
                f"{VARIABLE}: {part[:40]!r} is no limit; give some of capability=8.6, multiprocessors=24, "
                "shared=99KiB, memory=8GiB, separated by commas"
            )
    if limits.get("capability") in SHARED:
        limits.setdefault("shared", SHARED[limits["capability"]] << 10)
    return limits


@functools.cache
def _of_environment() -> Mapping[str, Any]:
    return parse(os.environ.get(VARIABLE, ""))


def played() -> Mapping[str, Any]:
    """Returns the limits of the card that is played, by name; empty if none is.

    Raises:
        ValueError: The environment variable is wrong.
    """
    return _of_environment() if _played is None else _played


def played_text() -> str:
    """Returns the limits of the card that is played, as the environment variable has them; "" if none is."""
    values = {
        name: ".".join(map(str, limit)) if isinstance(limit, tuple) else str(limit)
        for name, limit in sorted(played().items())
    }
    return ",".join(f"{name}={value}" for name, value in values.items())


@contextmanager
def playing(limits: str) -> Iterator[None]:
    """Plays a smaller card within the context, in all threads; the environment variable does not matter there.

    Args:
        limits: as in the environment variable; empty: those of the real device.
    """
    global _played
    before, _played = _played, parse(limits)
    forget_plans()
    try:
        yield
    finally:
        _played = before
        forget_plans()


@functools.cache
def _of_gpu(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    return DeviceLimits(
        properties.multi_processor_count,
        getattr(
            properties, "shared_memory_per_block_optin", 48 << 10
        ),  # PyTorch for AMD's GPUs has no such attribute
        (properties.major, properties.minor),
        properties.total_memory,
    )


def real_limits(device: torch.device) -> DeviceLimits:
    """Returns the limits of a device itself; those of an H200 for a CPU, and without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


def limits_of(device: torch.device) -> DeviceLimits:
    """Returns the limits to keep to on a device: its own, or those of the card that is played, if they are lower."""
    return real_limits(device).within(played())
