"""The persistent kernels compiled for GPUs that are not there: they fit, spill as little as they did, and wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("compile_persistent.py")

# Capability, then: batch, hidden, back, type, type of products, lengths; at most so many registers, bytes of stack and
# of shared memory.
WALKS: dict[int, list[tuple[list[Any], tuple[int, int, int]]]] = {
    90: [
        ([64, 512, False, "bf16", "bf16", True], (136, 0, 81_920)),
        ([64, 512, True, "bf16", "bf16", True], (255, 0, 163_840)),
        ([128, 512, False, "fp32", "fp16", False], (136, 0, 98_304)),
        ([128, 512, True, "fp32", "fp16", False], (255, 0, 196_608)),
        ([128, 1024, False, "bf16", "bf16", False], (224, 0, 229_376)),
        ([128, 1024, True, "bf16", "bf16", False], (240, 0, 229_376)),
        ([128, 1500, False, "bf16", "bf16", False], (184, 0, 229_376)),
        ([128, 1500, True, "bf16", "bf16", False], (240, 0, 229_376)),
        ([17, 33, True, "fp16", "fp16", True], (160, 0, 16_384)),
    ],
    86: [
        ([64, 256, False, "bf16", "bf16", True], (160, 0, 49_152)),
        ([64, 256, True, "bf16", "bf16", False], (200, 0, 81_920)),
    ],
    80: [
        ([64, 512, False, "bf16", "bf16", False], (224, 0, 81_920)),
        ([64, 256, True, "fp32", "fp16", True], (200, 0, 81_920)),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.thorough) for each in (86, 80))]
)
def test_kernels_fit(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    walks = json.dumps([walk for walk, _ in WALKS[capability]])
    done = subprocess.run(
        [sys.executable, SCRIPT, str(capability), walks], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for found, (walk, (registers, stack, shared)) in zip(lines, WALKS[capability], strict=True):
        told = f"{walk}: {found}"
        assert found["registers"] <= registers, told
        assert found["stack"] <= stack, told
        assert found["shared"] <= shared, told
        assert found["wide products" if capability >= 90 else "products"] > 0, told
        assert found["barriers between programs"] >= 2, told
