"""Memory budgets: the bytes that ``training.memory_budget`` stands for on this machine, and sizes as text."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from econmt.config.yaml_reader import parse_size
from econmt.engine.machine import free_memory

AUTO_SHARE = 0.9
"""Share of the free memory that ``auto`` takes; the rest is for memory outside of tensors, such as fragments."""

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def budget_bytes(value: str, device: torch.device, taken: int) -> int:
    """Returns the bytes of a budget such as 4GiB; "auto" is :data:`AUTO_SHARE` of the device's free memory.

    Of the budget, this process has allocated ``taken`` bytes already, which are no longer free.
    """
    if value != "auto":
        return parse_size(value)
    free = free_memory(device)
    if device.type == "cuda":
        # Unused memory of the caching allocator is free for this process.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        available = group_memory()
        free = free if available is None else min(free, available)
    return int(AUTO_SHARE * (free + taken))


def group_memory() -> int | None:
    """Returns the bytes that this process's control group (a container, a batch job) may still take; None: no limit.

    In version 2, every group up to the root has a limit; in version 1, the group that a container sees as its own.
    Droppable pages of files do not count as taken.
    """
    try:
        path = _OWN_GROUP.read_text(encoding="utf-8")
    except OSError:
        return None
    unified = next((line[3:] for line in path.splitlines() if line.startswith("0::")), "/")
    group = _GROUPS / unified.strip("/")
    folders = [group, *group.parents]
    second = ("memory.max", "memory.current", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    available = [_below_limit(folder, *second) for folder in folders[: folders.index(_GROUPS) + 1]]
    available.append(_below_limit(_GROUPS / "memory", *first))
    return min((size for size in available if size is not None), default=None)


def _below_limit(folder: Path, limit_file: str, usage_file: str, droppable: str) -> int | None:
    """Returns the bytes that a control group may still take; None if it has no limit."""
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
    """Formats bytes in the units of budgets: 1.3 GiB."""
    value, unit = _in_unit(size)
    return f"{value:.3g} {unit}"


def _in_unit(size: float) -> tuple[float, str]:
    """Returns a size below 1000 and its unit."""
    units = iter(_UNITS)
    unit = next(units)
    while size >= 1000 and unit != _UNITS[-1]:
        size, unit = size / 1024, next(units)
    return size, unit


def nearest_budget(size: int) -> str:
    """Returns the smallest budget of two digits that is at least ``size`` bytes, as a recipe has it: 1.4GiB."""
    value, unit = _in_unit(size)
    step = 10.0 ** (math.floor(math.log10(max(value, 1.0))) - 1)
    steps = math.floor(value / step)
    # Rounding in the division may make it one step too few.
    while parse_size(text := f"{round(max(steps, 1) * step, 1):g}{unit}") < size:
        steps += 1
    return text
