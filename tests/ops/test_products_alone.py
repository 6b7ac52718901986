"""Products of the C library without Python: by gcc and clang, and for Arm's processors in an emulator.

Debian's packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static have what Arm's need.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

FLAGS = ["-std=c11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
ARM, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
CASES = [
    *(
        pytest.param(
            f"{compiler} {optimization}", [], most, None, id=f"{compiler}{optimization}, {most}", marks=marks
        )
        for compiler in ("gcc", "clang")
        for optimization, marks in (("-O0", ()), ("-O2", pytest.mark.slow))
        for most in range(4)
    ),
    pytest.param(f"{ARM} -O2", [EMULATOR, "-cpu", "cortex-a72"], 3, 0, id="Arm without dot products"),
    pytest.param(f"{ARM} -O2", [EMULATOR, "-cpu", "max"], 0, 0, id="Arm, plain"),
    pytest.param(f"{ARM} -O2", [EMULATOR, "-cpu", "max"], 3, 1, id="Arm with dot products"),
]


def level_here() -> int:
    """Returns the highest level of this machine that the system names."""
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        pytest.skip("no list of this processor's instructions")
    flags = set(Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split())
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
    return 0 if not {"avx2", "fma"} <= flags else 2 if wide else 1


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles the program by a compiler and its optimization, once."""

    @functools.cache
    def compiled(compiler: str) -> Path:
        program, folder = tmp_path_factory.mktemp("programs") / "program", ROOT / "ops/econmt_ops/backends/c"
        sources = ["-I", folder, ROOT / "tests/ops/products_alone.c"]
        command = [*compiler.split(), *FLAGS, *sources, "-o", program, "-lm"]
        command += ["-static"] * (ARM in compiler)  # the emulator finds no libraries of Arm's
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return program

    return compiled


@pytest.mark.parametrize(("compiler", "emulator", "most", "level"), CASES)
def test_products_are_those_of_double(
    programs: Callable[[str], Path], compiler: str, emulator: list[str], most: int, level: int | None
) -> None:
    for tool in (compiler.split()[0], *emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    expected = min(most, level_here()) if level is None else level
    command = [*emulator, programs(compiler), str(most)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *kinds, wrong, digest = ran.stdout.splitlines()
    assert int(first) == expected
    errors = [float(line.split()[1]) for line in kinds]
    assert len(errors) == 3
    assert max(errors) < 2e-6
    assert (wrong, digest) == ("wrong 0", "digest 40bc1780")  # with every compiler and instruction
