"""A byte budget: how many bytes ``training.memory_budget`` means on this machine, and bytes as words."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from econmt.config.yaml_reader import parse_size
from econmt.memory.measure.machine import free_memory

AUTO_SHARE = 0.9
"""Share of what is free that ``auto`` takes: the rest is for what no tensor accounts for, such as fragments."""

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def budget_bytes(value: str, device: torch.device, taken: int) -> int:
    """The bytes of a budget as a recipe writes it.

    Args:
        value: a size such as 4GiB, or auto: :data:`AUTO_SHARE` of what is free on the device.
        device: where training computes.
        taken: bytes of the budget that this process has taken already, which are no longer free.
    """
    if value != "auto":
        return parse_size(value)
    free = free_memory(device)
    if device.type == "cuda":
        # What the caching allocator holds and no tensor uses is free for this process.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        room = group_room()
        free = free if room is None else min(free, room)
    return int(AUTO_SHARE * (free + taken))


def total_memory(device: torch.device) -> int:
    """All bytes that a device has, or the machine; 0 if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def group_room() -> int | None:
    """Bytes that the control group of this process (a container, a batch job) may still take; None: no limit.

    Of version 2 every group up to the root is asked, of version 1 the one that a container sees as its own. Pages of
    files that could be dropped do not count as taken.
    """
    try:
        path = _OWN_GROUP.read_text(encoding="utf-8")
    except OSError:
        return None
    unified = next((line[3:] for line in path.splitlines() if line.startswith("0::")), "/")
    own = _GROUPS / unified.strip("/")
    folders = [own, *own.parents]
    rooms = [
        room
        for folder in folders[: folders.index(_GROUPS) + 1]
        if (room := _room(folder, "memory.max", "memory.current", "inactive_file")) is not None
    ]
    first = _room(_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    rooms += [] if first is None else [first]
    return min(rooms, default=None)


def _room(folder: Path, limit_file: str, usage_file: str, droppable: str) -> int | None:
    try:
        limit = (folder / limit_file).read_text(encoding="ascii").strip()
        usage = int((folder / usage_file).read_text(encoding="ascii"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return None
    if limit == "max":
        return None
    values = dict(line.split() for line in statistics.splitlines())
    return max(0, int(limit) - usage + int(values.get(droppable, 0)))


def size_text(size: float) -> str:
    """Bytes for a person, in the units in which budgets are given: 1.3 GiB."""
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.3g} {_UNITS[unit]}"


def nearest_budget(size: int) -> str:
    """The smallest budget of two digits, as a recipe writes it, that is at least ``size`` bytes: 1.4GiB."""
    unit = 0
    value = float(size)
    while value >= 1000 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    step = 10.0 ** (math.floor(math.log10(max(value, 1.0))) - 1)
    steps = math.floor(value / step)
    # Rounding of the division could make it one too few.
    while parse_size(text := f"{round(max(steps, 1) * step, 1):g}{_UNITS[unit]}") < size:
        steps += 1
    return text
