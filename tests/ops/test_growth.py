"""A process that makes products of ever new numbers of rows does not grow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import SOURCES

GROWTH = """
import ctypes, torch, econmt_ops

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def losses(dtype, rows):
    weight = torch.randn(600, 64, requires_grad=True)
    for number in rows:
        hidden, targets = torch.randn(number, 64, dtype=dtype, requires_grad=True), torch.randint(0, 600, (number,))
        econmt_ops.linear_cross_entropy(hidden, weight, targets, implementation="recompute").backward()
        econmt_ops.linear(hidden, weight, layout="packed").sum().backward()

torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    losses(dtype, range(300, 340))
    before = resident()
    losses(dtype, range(340, 440))
    print(resident() - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and trims the C library's heap")
def test_products_of_many_shapes_leave_nothing_behind() -> None:
    # PyTorch keeps 0.3 MB of each shape, 1,024 of them, unless it is told not to: 60 MB here, for each type.
    kept = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    path = SOURCES
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", GROWTH]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    for grown in map(int, found.stdout.split()):
        assert grown < 10e6
