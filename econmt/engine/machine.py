"""Description of the machine, and its free memory."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import numpy as np
import torch

import econmt
from econmt_ops.dispatch.device_limits import VARIABLE, limits_of, played_text, real_limits
from econmt_ops.dispatch.measurements import processor

_SYSTEM = Path("/proc")


def describe_machine(device: str) -> dict[str, str]:
    """Returns the environment of a measurement: versions, processor, threads and, on "cuda" or "cuda:N", the GPU."""
    description = {
        "econmt": econmt.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "threads": str(torch.get_num_threads()),
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        description["GPU"] = torch.cuda.get_device_name(device)
        if played_text():
            description[VARIABLE] = played_text()
    return description


def total_memory(device: torch.device) -> int:
    """Returns the bytes of memory of a GPU or of the machine; 0 if the system does not tell."""
    if device.type == "cuda":
        return limits_of(device).memory
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: torch.device) -> int:
    """Returns the bytes that a process may still take: of the GPU, or of the machine without swapping."""
    if device.type == "cuda":
        beyond = real_limits(device).memory - limits_of(device).memory  # of a smaller card that is played
        return max(0, int(torch.cuda.mem_get_info(device)[0]) - beyond)
    try:
        text = (_SYSTEM / "meminfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    if available:
        return 1024 * int(available[1])
    # The standard library does not tell the free memory of other systems: assumes half of all memory, or no limit.
    return total_memory(device) // 2 or 1 << 62
