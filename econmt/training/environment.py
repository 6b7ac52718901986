"""What a run's last bits depend on beside its recipe: versions, device and threads, kept with its state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import econmt


def environment_of(device: torch.device) -> dict[str, str]:
    """What this process computes with; the threads only where they compute."""
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
