"""Products of the C library without Python: by this machine's compiler, and for Arm's processors in an emulator.

Debian's packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static have what Arm's need.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

FLAGS = [
    "-O2",
    "-std=c11",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
ARM, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
CASES = [
    pytest.param("gcc", [], 0, 0, id="plain", marks=pytest.mark.slow),
    pytest.param(ARM, [EMULATOR, "-cpu", "cortex-a72"], 3, 0, id="Arm without dot products"),
    pytest.param(ARM, [EMULATOR, "-cpu", "max"], 0, 0, id="Arm, plain"),
    pytest.param(ARM, [EMULATOR, "-cpu", "max"], 3, 1, id="Arm with dot products"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles the program for a compiler's processor, once."""

    @functools.cache
    def compiled(compiler: str) -> Path:
        program, folder = tmp_path_factory.mktemp("programs") / compiler, ROOT / "ops/econmt_ops/backends/c"
        command = [compiler, *FLAGS, "-I", folder, ROOT / "tests/ops/products_alone.c", "-o", program, "-lm"]
        command += ["-static"] * (compiler == ARM)  # the emulator finds no libraries of Arm's
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return program

    return compiled


@pytest.mark.parametrize(("compiler", "emulator", "most", "level"), CASES)
def test_products_are_those_of_double(
    programs: Callable[[str], Path], compiler: str, emulator: list[str], most: int, level: int
) -> None:
    for tool in (compiler, *emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    command = [*emulator, programs(compiler), str(most)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *kinds = ran.stdout.splitlines()
    assert int(first) == level
    errors = [float(line.split()[1]) for line in kinds]
    assert len(errors) == 3
    assert max(errors) < 2e-6
