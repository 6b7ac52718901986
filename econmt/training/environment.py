"""Environment that the last bits of a run depend on: versions, device and threads, saved with its state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import econmt


def environment_of(device: torch.device) -> dict[str, str]:
    """Returns the environment of this process; the number of threads only where the CPU computes."""
    found = {"econmt": econmt.__version__, "torch": str(torch.__version__), "device": device.type}
    return {**found, "threads": str(torch.get_num_threads())} if device.type == "cpu" else found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line if a run goes on with something else than it was saved with; a state of an earlier version says nothing.

    Example::

        going on with threads 2 instead of 1: weights will differ, by rounding, from those of a run without this change
    """
    changed = [
        f"{name} {now[name]} instead of {before[name]}"
        for name in now
        if name in before and before[name] != now[name]
    ]
    if not changed:
        return []
    return [
        f"going on with {', '.join(changed)}: weights will differ, by rounding, from those of a run without this change"
    ]
