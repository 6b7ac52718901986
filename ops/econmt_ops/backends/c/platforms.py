"""Compiles the C library: for this machine, or by zig for the other systems that econmt_runtime runs on.

It needs the sources beside it and nothing of this package, so that setup.py runs this file.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

FLAGS = (
    *("-O3", "-g0", "-std=c11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-fvisibility=hidden"),
)
HERE = f"{platform.system()}-{platform.machine()}".lower()
"""Name of this system and processor, as econmt_runtime.library has it."""
PLATFORMS = {
    "linux-x86_64": ("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64.musllinux_1_1_x86_64"),
    "linux-aarch64": ("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64.musllinux_1_1_aarch64"),
    "darwin-arm64": ("aarch64-macos.11.0", "macosx_11_0_arm64"),
    "darwin-x86_64": ("x86_64-macos.11.0", "macosx_11_0_x86_64"),
    "windows-amd64": ("x86_64-windows-gnu", "win_amd64"),
}
"""Targets of zig and tags of wheels, by system and processor. musl loads a library of an old glibc."""


def compile_library(folder: Path, name: str | None = None) -> None:
    """Writes the library to a folder: for a system of :data:`PLATFORMS`, or by the compiler of CC for this one.

    Raises:
        OSError: There is no compiler, or it fails.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if name is not None:
        zig = [sys.executable, "-m", "ziglang", "cc"]
        compiler = [*zig, "-target", PLATFORMS[name][0], "-s", "-Wno-pass-failed"]
    source, library = Path(__file__).resolve().with_name("kernels.c"), f"_kernels.{name or HERE}.so"
    command = [*compiler, *FLAGS, "-shared", "-fPIC", str(source), "-o", library, "-lm"]
    # In the folder, where Windows' linker leaves a file of its own.
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603  no shell
    (folder / "kernels.lib").unlink(missing_ok=True)
    if done.returncode:
        raise OSError(f"{shlex.join(command[:3])} failed: {done.stderr.strip()[-300:]}")
