"""Memory of the machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MEMORY = Path("/proc/meminfo")


def total_ram() -> int:
    """Returns the bytes of the machine's memory; 0 if the system does not tell."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_ram() -> int:
    """Returns the bytes of memory that the machine may still give out without swapping."""
    try:
        text = _MEMORY.read_text(encoding="utf-8")
    except OSError:
        text = ""
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    if available:
        return 1024 * int(available[1])
    # The standard library does not tell the free memory of other systems: assumes half of all memory, or no limit.
    return total_ram() // 2 or 1 << 62
