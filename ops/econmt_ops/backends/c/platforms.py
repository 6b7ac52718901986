"""Compiles the C library alone: for this machine, or by zig for the other systems that econmt_runtime runs on.

It needs the sources beside it and nothing of this package, so that setup.py of econmt_runtime runs this file, too.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FLAGS = (
    *("-O3", "-g0", "-std=c11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=fast", "-fvisibility=hidden"),
)
HERE = f"{platform.system()}-{platform.machine()}".lower()
"""Name of this system and processor, as econmt_runtime.library has it."""


class Platform(NamedTuple):
    """Names of a system and processor: what zig calls it, and the tag of its wheels."""

    target: str
    wheel: str


# musl loads a library of an old glibc: it gives it functions of its own, of which this one needs few.
PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64.musllinux_1_1_x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64.musllinux_1_1_aarch64"),
    "darwin-arm64": Platform("aarch64-macos.11.0", "macosx_11_0_arm64"),
    "darwin-x86_64": Platform("x86_64-macos.11.0", "macosx_11_0_x86_64"),
    "windows-amd64": Platform("x86_64-windows-gnu", "win_amd64"),
}


def compile_library(folder: Path, name: str | None = None) -> None:
    """Writes the library to a folder: for a platform of :data:`PLATFORMS`, or by the compiler of CC for this machine.

    Raises:
        OSError: There is no compiler, or it fails.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if name is not None:
        compiler = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            PLATFORMS[name].target,
            "-s",
            "-Wno-pass-failed",
        ]
    source, library = Path(__file__).with_name("kernels.c"), folder / f"_kernels.{name or HERE}.so"
    # In the folder, where Windows' linker leaves a file of its own.
    command = [*compiler, *FLAGS, "-shared", "-fPIC", str(source), "-o", library.name, "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603  no shell
    (folder / "kernels.lib").unlink(missing_ok=True)
    if done.returncode:
        raise OSError(f"{shlex.join(command[:3])} failed: {done.stderr.strip()[-300:]}")
