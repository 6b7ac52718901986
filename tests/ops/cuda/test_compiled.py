"""The kernels of econmt_ops.backends.cuda as they are compiled for GPUs, which needs none."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt_ops.backends.cuda import adam, decoder, library
from econmt_ops.backends.cuda.library import architecture

CARDS = [pytest.param(each, marks=pytest.mark.thorough) for each in ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0))]
SPILLED = 16
"""Bytes of a thread's registers that may be kept in memory."""


def compile_source(name: str, capability: tuple[int, int], macros: dict[str, int], folder: Path) -> str:
    """What the compiler says of a source."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc")
    options = ["-std=c++17", "-cubin", "-Xptxas", "-v", f"-arch={architecture(capability)}"]
    options += ["-o", str(folder / "code")]
    defined = [f"-D{key}={value}" for key, value in macros.items()]
    source = Path(decoder.__file__).parent / name
    command = [compiler, *options, *defined, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("capability", [(8, 6), *CARDS])
def test_adam_is_compiled_for_every_card(capability: tuple[int, int], tmp_path: Path) -> None:
    said = compile_source("adam.cu", capability, adam.MACROS, tmp_path)
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"]
    (registers,) = re.findall(r"Used (\d+) registers", said)
    assert int(registers) <= 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_registers_suffice_and_products_overlap(
    name: str, masked: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = decoder.DecoderSizes(dtype, 512, 512, 2, 100, 128, masked=masked, residual=masked)
    said = compile_source(f"decoder_{name}.cu", (9, 0), decoder.macros(name, sizes), tmp_path)
    # ptxas says so where it waits for each product of the tensor cores before it begins the next one.
    assert "serialized" not in said
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    assert int(spilled) <= SPILLED, said


def test_code_is_compiled_once_by_each_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[bytes] = []
    version = [12, 8]

    def compile_source(*which: object) -> bytes:
        compiled.append(repr(which).encode())
        return compiled[-1]

    def tell(*numbers: Any) -> None:
        for number, value in zip(numbers, version, strict=True):
            ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = value

    monkeypatch.setattr(library, "_compiled", compile_source)
    monkeypatch.setattr(library, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=tell))
    monkeypatch.setenv("ECONMT_CACHE", str(tmp_path))
    each = [*itertools.product(("adam.cu", "decoder_forward.cu"), ({"A": 2}, {"A": 3}), ((9, 0), (8, 0)))]
    codes = [library.compiled(*which) for which in each * 2]
    assert b"['--gpu-architecture=sm_90a', '--std=c++17', '-DA=2']" in codes[0]
    assert codes[:8] == codes[8:] == compiled
    version[1] = 9
    assert [library.compiled(*which) for which in each * 2] == codes
    assert compiled == codes
    files = [*library.code_folder("cuda").iterdir()]
    assert len(files) == 16
    for number, file in enumerate(files):  # what a power cut can leave
        content = file.read_bytes()
        file.write_bytes([b"", content[:40], content[:-1], bytes(len(content))][number % 4])
    assert [library.compiled(*which) for which in each * 2] == codes
    assert len(compiled) == 24


def test_both_kernels_of_a_decoder_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(decoder, "compiled", lambda *which: [*which, both.wait()][:3])
    codes = decoder._codes((("forward", (("A", 1),)), ("backward", (("A", 2),))), (9, 0))
    assert codes["forward"] == ["decoder_forward.cu", {"A": 1}, (9, 0)]
    assert codes["backward"] == ["decoder_backward.cu", {"A": 2}, (9, 0)]
