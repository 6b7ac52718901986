"""Software versions, device and threads, which rounding depends on and which are saved with a run's state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import econmt


def environment_of(device: torch.device) -> dict[str, str]:
    """Returns the environment of this process; the number of threads only if the CPU computes."""
    environment = {"econmt": econmt.__version__, "torch": str(torch.__version__), "device": device.type}
    return {**environment, "threads": str(torch.get_num_threads())} if device.type == "cpu" else environment


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns one line if a run is resumed in another environment than it was saved in; values not saved are ignored.

    Example::

        resuming with threads 2 instead of 1: parameters will differ by rounding from those of an unchanged run
    """
    changed = [
        f"{name} {now[name]} instead of {before[name]}"
        for name in now
        if name in before and before[name] != now[name]
    ]
    if not changed:
        return []
    return [
        f"resuming with {', '.join(changed)}: parameters will differ by rounding from those of an unchanged run"
    ]
