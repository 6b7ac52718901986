"""Smaller GPUs: what the product asks of a device is answered as if it were one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from econmt_ops.dispatch import device_limits
from econmt_ops.dispatch.device_limits import DeviceLimits
from econmt_ops.dispatch.plans import forget_plans

SHARED = {(7, 5): 64} | dict.fromkeys([(8, 0), (8, 7)], 163) | dict.fromkeys([(9, 0), (10, 0)], 227)
SHARED |= dict.fromkeys([(8, 6), (8, 9), (12, 0)], 99)
"""KiB of shared memory that a program may use, by compute capability (CUDA C++ Programming Guide, table of technical
specifications per compute capability)."""


@contextmanager
def simulated_gpu(**limits: Any) -> Iterator[None]:
    """Simulates a GPU with the lower one of each limit, by name of `DeviceLimits`, and with another capability.

    Without ``shared``, a capability implies the shared memory of its GPUs.
    """
    if limits.get("capability") in SHARED:
        limits.setdefault("shared", SHARED[limits["capability"]] << 10)
    of_gpu = device_limits._of_gpu

    def lowered(real: DeviceLimits) -> DeviceLimits:
        lower = {
            name: min(getattr(real, name), most) for name, most in limits.items() if name != "capability"
        }
        return real._replace(**lower, capability=limits.get("capability", real.capability))

    forget_plans()
    try:
        with mock.patch.multiple(
            device_limits, H200=lowered(device_limits.H200), _of_gpu=lambda index: lowered(of_gpu(index))
        ):
            yield
    finally:
        forget_plans()
