"""What kernels take of a GPU, asked of a process of its own: there the interpreter is off."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.conftest import run_python
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
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        done = run_python("-m", f"tests.ops.triton.{module}", str(capability), *names, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
