"""Products of the C library without Python: by gcc, clang and zig, for Arm's processors in an emulator and for Windows in wine.

Debian's packages clang, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static, musl and wine have what they need.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from econmt_ops.backends.c.platforms import FLAGS, HERE, PLATFORMS, compile_library
from tests.conftest import ROOT

SOURCES = ROOT / "ops/econmt_ops/backends/c"
ZIG = "zig -target"
COMMANDS = {"zig": [sys.executable, "-m", "ziglang", "cc"]}
ARM, EMULATOR = "aarch64-linux-gnu-gcc -static", "qemu-aarch64-static"
STAND_IN = shlex.quote('-DAVX_VNNI="avx2,avx512vl,avx512vnni"') + " -DHAS_AVX_VNNI=1"
"""Takes AVX-512's form of AVX-VNNI's instructions, which more processors have."""
CASES = [
    *(
        pytest.param(f"{compiler} {optimization}", "", most, None, marks=marks)
        for compiler, optimization, marks in (
            *((compiler, "-O0", ()) for compiler in ("gcc", "clang")),
            *((compiler, "-O2", pytest.mark.slow) for compiler in ("gcc", "clang")),
            (f"{ZIG} x86_64-linux-musl", "-static", pytest.mark.slow),
        )
        for most in range(4)
    ),
    *(
        pytest.param(f"{compiler} -O0 {STAND_IN}", "", 1, 1, id=f"AVX-VNNI, {compiler}")
        for compiler in ("gcc", "clang")
    ),
    *(
        pytest.param(compiler, f"{EMULATOR} -cpu {cpu}", most, level, marks=pytest.mark.slow)
        for compiler in (ARM, f"{ZIG} aarch64-linux-musl -static")
        for cpu, most, level in (("cortex-a72", 3, 0), ("max", 0, 0), ("max", 3, 1))
    ),
    *(
        pytest.param(f"{ZIG} {PLATFORMS['windows-amd64'][0]}", "wine", most, None, marks=pytest.mark.slow)
        for most in range(4)
    ),
]


def instructions() -> set[str]:
    """Returns the instructions of this machine that the system names."""
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        pytest.skip("no list of this processor's instructions")
    return set(Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split())


def level_here() -> int:
    """Returns the highest level of this machine that the system names."""
    flags = instructions()
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
    return 0 if not {"avx2", "fma"} <= flags else 2 if wide else 1


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles the program by a compiler and its optimization, once."""

    @functools.cache
    def compiled(compiler: str) -> Path:
        program = tmp_path_factory.mktemp("programs") / "program"
        first, *more = shlex.split(compiler)
        sources = ["-I", SOURCES, ROOT / "tests/ops/products_alone.c"]
        command = [*COMMANDS.get(first, [first]), *FLAGS, *more, *sources, "-o", program, "-lm"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return program

    return compiled


@pytest.mark.parametrize(("compiler", "emulator", "most", "level"), CASES)
def test_products_are_those_of_double(
    programs: Callable[[str], Path], compiler: str, emulator: str, most: int, level: int | None
) -> None:
    for tool in (compiler.split()[0], *emulator.split()[:1]):
        if tool in COMMANDS:
            pytest.importorskip("ziglang")
        elif shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    if STAND_IN in compiler and not {"avx512_vnni", "avx512vl"} <= instructions():
        pytest.skip("a processor without such instructions")
    expected = min(most, level_here()) if level is None else level
    command = [*emulator.split(), programs(compiler), str(most)]
    wine = {"WINEPREFIX": f"{command[-2]}-wine", "WINEDEBUG": "-all"}
    ran = subprocess.run(command, env={**os.environ, **wine}, capture_output=True, text=True, check=True)
    first, *kinds, wrong, digest = ran.stdout.splitlines()
    assert int(first) == expected
    errors = [float(line.split()[1]) for line in kinds]
    assert len(errors) == 3
    assert max(errors) < 2e-6
    assert (wrong, digest) == ("wrong 0", "digest 40bc1780")  # with every compiler and instruction


LOADER = """
#include <dlfcn.h>
int main(int count, char **words) {
  void *library = dlopen(words[1], RTLD_NOW);
  int (*start)(void *, void *, void *, int) = library ? dlsym(library, "econmt_start") : 0;
  return start ? start(0, 0, 0, 3) : 99;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", PLATFORMS)
def test_libraries_for_other_systems_have_every_function(tmp_path: Path, name: str) -> None:
    pytest.importorskip("ziglang")
    compile_library(tmp_path, name)
    (library,) = tmp_path.iterdir()
    written = re.findall(r"^EXPORT \w+ (econmt_\w+)\(", (SOURCES / "kernels.c").read_text(), re.MULTILINE)
    named = {each.decode() for each in re.findall(rb"(?<=[\0_])econmt_\w+(?=\0)", library.read_bytes())}
    assert named == {*written}
    if name != HERE:
        return
    assert ctypes.CDLL(str(library)).econmt_start(None, None, None, 3) == level_here()
    if not Path("/lib/ld-musl-x86_64.so.1").exists():
        pytest.skip("no musl")
    (tmp_path / "loader.c").write_text(LOADER)
    program = tmp_path / "loader"
    options = ["-target", "x86_64-linux-musl", "-dynamic", "-O2"]
    subprocess.run([*COMMANDS["zig"], *options, tmp_path / "loader.c", "-o", program], check=True)
    assert subprocess.run([program, library], check=False).returncode == level_here()
