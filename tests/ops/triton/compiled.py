"""What kernels take of a GPU, asked of a process of its own: there the interpreter is off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from tests.conftest import ROOT, SOURCES, econmt_environment
from tests.ops.simulated_gpu import SHARED

CAPABILITIES = (80, 86, 89, 90, 120)
"""Compute capabilities for which all kernels are compiled."""


def assert_fits(capability: int, found: dict[str, Any], spilled: int = 0) -> None:
    """Every kernel has room in a multiprocessor, and keeps at most that many bytes of registers in memory."""
    most = SHARED[divmod(capability, 10)] << 10
    for name, kernels in found.items():
        for kernel in kernels:
            assert kernel["shared"] <= most, (name, kernel)
            assert kernel["stack"] <= spilled, (name, kernel)


def compiled(capability: int, names: Iterable[str] = (), module: str = "compiling") -> dict[str, Any]:
    """What ``python -m MODULE CAPABILITY NAME...`` prints last: by call, what its kernels take."""
    environment = {**econmt_environment(), "PYTHONPATH": SOURCES}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", f"tests.ops.triton.{module}", str(capability), *names],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
