"""As `compiling`, the launches of all these modules.

``python -m tests.ops.triton.compiling_all CAPABILITY NAME...``, with the names of the modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tests.ops.triton import (
    compiling,
    compiling_output,
    compiling_persistent,
    compiling_recurrence,
    compiling_scan_cells,
)


def launches(capability: int, *names: str) -> dict[str, Callable[[], Any]]:
    """These launches by name."""
    modules = compiling, compiling_output, compiling_recurrence, compiling_scan_cells
    found = {name: launch for module in modules for name, launch in module.launches().items()}
    return found | compiling_persistent.launches(capability, *(name for name in names if name not in found))


if __name__ == "__main__":
    compiling.report(launches(int(sys.argv[1]), *sys.argv[2:]))
