"""The machine a figure was taken on: what it is, and how much memory is free."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import numpy as np
import torch

import econmt
from econmt_ops.dispatch.measurements import processor

_SYSTEM = Path("/proc")


def describe_machine(device: str) -> dict[str, str]:
    """Returns the environment of a measurement: versions, processor, threads and GPU.

    Args:
        device: "cpu", "cuda" or "cuda:N"; the GPU is named if torch sees it.
    """
    found = {
        "econmt": econmt.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "threads": str(torch.get_num_threads()),
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name(device)
    return found


def free_memory(device: torch.device) -> int:
    """Bytes that a process may still take: of the GPU, or of the machine without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        text = (_SYSTEM / "meminfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    if found:
        return 1024 * int(found[1])
    # Elsewhere nothing in the standard library tells what is free: half of what there is, or anything.
    if not hasattr(os, "sysconf"):
        return 1 << 62
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
