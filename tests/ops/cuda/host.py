"""The kernels of econmt_ops.backends.cuda compiled for the CPU, where their blocks and threads are coroutines.

``host/device.cuh`` takes the place of the header that speaks to the GPU. What the kernels compute, how blocks wait for
each other and how much shared memory they use is what a GPU would do; that products and copies take time is not.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from econmt_ops.backends.cuda import decoder
from tests.conftest import ROOT

SOURCES = Path(decoder.__file__).parent
MEANING = {1: "its threads wait for each other for ever", 2: "it wrote beyond its shared memory"}


@functools.cache
def _library(kernel: str, argument: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compiles a kernel, unless an earlier run of the tests has compiled the same text."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    main = (
        f'#include "{kernel}.cu"\n'
        f'extern "C" int launch(int blocks, int threads, int cluster, size_t shared, unsigned seed,'
        f" int late_block, int late_warp, int others, {argument}* its) {{ return"
        f" run_grid(blocks, threads, cluster, shared, seed, late_block, late_warp, others, [its] {{ {kernel}(*its); }}); }}\n"
    )
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", *(f"-D{key}={value}" for key, value in macros)]
    # The header of the host, as the last one, takes the place of that of the GPU.
    sources = [*sorted(SOURCES.glob("*.cu*")), Path(__file__).parent / "host" / "device.cuh"]
    text = "\0".join([compiler, main, *options, *(source.read_text(encoding="utf-8") for source in sources)])
    built = ROOT / "build" / "host" / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as name:
            for source in sources:
                shutil.copy(source, name)
            (Path(name) / "main.cc").write_text(main)
            subprocess.run([compiler, *options, "-o", "kernel.so", "main.cc"], cwd=name, check=True)
            (Path(name) / "kernel.so").replace(built)
    return ctypes.CDLL(str(built))


class HostKernel(NamedTuple):
    """A kernel on the CPU, launched as `econmt_ops.backends.cuda.library.Kernel` is; see `use_host`."""

    kernel: str
    argument: str
    macros: dict[str, int]
    threads: int
    cluster: int
    seed: int
    late_block: int = -1
    late_warp: int = -1
    others: bool = False

    def launch(self, blocks: int, shared_bytes: int, argument: ctypes.Structure) -> None:
        """Runs all blocks, their threads in an order drawn from the seed; those that are late run when no other can."""
        library = _library(self.kernel, self.argument, tuple(self.macros.items()))
        shared = ctypes.c_size_t(shared_bytes)
        order = self.seed, self.late_block, self.late_warp, self.others
        code = library.launch(blocks, self.threads, self.cluster, shared, *order, ctypes.byref(argument))
        assert not code, f"{self.kernel}: {MEANING[code]}"


def use_host(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    late_block: int = -1,
    late_warp: int = -1,
    *,
    others: bool = False,
) -> list[str]:
    """Lets the kernels serve the CPU; returns the list to which the name of each one that is launched is added.

    Args:
        monkeypatch: of the test.
        seed: of the order of the threads.
        late_block, late_warp: the block whose threads, or the warp of every block that runs only when no other thread
            can; -1: none.
        others: True if all others are late instead.
    """
    launches: list[str] = []

    def launch_of(name: str, sizes: decoder.DecoderSizes, _device: int) -> tuple[HostKernel, int]:
        launches.append(name)
        macros = decoder.macros(name, sizes)
        argument = f"{name.capitalize()}Arguments"
        kernel = HostKernel(
            f"decoder_{name}", argument, macros, 512, macros["CLUSTER"], seed, late_block, late_warp, others
        )
        return kernel, sizes.shared_bytes(name, sizes.stages(name))

    monkeypatch.setattr(decoder, "serves", lambda sizes, _device: sizes.are_served())
    monkeypatch.setattr(decoder, "_launch_of", launch_of)
    return launches
