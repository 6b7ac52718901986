"""The kernels of econmt_ops.backends.cuda as they are compiled for a Hopper GPU, which needs none."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from econmt_ops.backends.cuda import decoder

SPILLED = 16
"""Bytes of a thread's registers that may be kept in memory."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_registers_suffice_and_products_overlap(name: str, masked: bool, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc")
    sizes = decoder.DecoderSizes(torch.bfloat16, 512, 512, 2, 100, 128, masked=masked, residual=masked)
    macros = [f"-D{key}={value}" for key, value in decoder.macros(name, sizes).items()]
    source = Path(decoder.__file__).parent / f"decoder_{name}.cu"
    options = ["-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "code")]
    done = subprocess.run(
        [compiler, *options, *macros, str(source)], capture_output=True, text=True, check=True
    )
    said = done.stdout + done.stderr
    # ptxas says so where it waits for each product of the tensor cores before it begins the next one.
    assert "serialized" not in said
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    assert int(spilled) <= SPILLED, said
