"""Compilation of this folder's kernels by NVRTC, and their launches by the CUDA driver.

Both libraries are called through ctypes. NVRTC is among the packages that PyTorch's CUDA builds require; the driver
belongs to the GPU. What has been compiled is kept in the folder ``cuda`` of econmt_ops' caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from econmt_ops.core.caches import code_folder
from econmt_ops.dispatch.device_limits import limits_of

_FOLDER = Path(__file__).parent
_CAPABILITY = (7, 5)
"""Lowest compute capability for which the kernels are compiled in tests."""
_HOPPER = (9, 0)
_COOPERATIVE, _CLUSTER = 2, 4
"""CUlaunchAttributeID of cooperative launches and of the size of clusters."""
_MOST_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_DIGEST = hashlib.sha256().digest_size
"""Bytes of the digest with which a file of compiled code begins."""

_SCALARS = {"float": ctypes.c_float, "int": ctypes.c_int, "long long": ctypes.c_longlong}
"""Types of ctypes by the names of those types of C that kernels take."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a value of at most three integers."""

    _fields_ = [("id", ctypes.c_int), ("_", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")  # loaded by torch already


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def is_available(device: torch.device) -> bool:
    """Returns True if kernels can be compiled for a device and launched on it."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return limits_of(device).capability >= _CAPABILITY and _can_be_loaded()


def is_hopper(device: torch.device) -> bool:
    """Returns True if `is_available` and the device has the instructions of Hopper GPUs."""
    return is_available(device) and limits_of(device).capability == _HOPPER


@functools.cache
def _can_be_loaded() -> bool:
    """Returns True if NVRTC and the driver can be loaded."""
    try:
        _nvrtc()
        _driver()
    except OSError:
        return False
    return True


def _check(code: int, call: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{call}: {(text.value or b'unknown error').decode()} ({code})")


def architecture(capability: tuple[int, int]) -> str:
    """Returns the compiler's name of GPUs of a compute capability."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability == _HOPPER else ''}"


def compiled(source: str, macros: Mapping[str, int], capability: tuple[int, int] | None = None) -> bytes:
    """Compiles a source of this folder to machine code, unless an earlier process has.

    Args:
        source: its file name. macros: compile-time parameters by name.
        capability: compute capability to compile for; None: that of the current device.

    Raises:
        RuntimeError: If it does not compile, with the compiler's messages.
    """
    chosen = architecture(capability or torch.cuda.get_device_capability())
    options = [f"--gpu-architecture={chosen}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    texts = {file.name: file.read_bytes() for file in (_FOLDER / source, *sorted(_FOLDER.glob("*.cuh")))}
    version = (ctypes.c_int * 2)()
    _nvrtc().nvrtcVersion(ctypes.byref(version), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    key = hashlib.sha256(repr((*version, options, texts)).encode()).hexdigest()
    kept = code_folder("cuda") / f"{key}.cubin"
    with contextlib.suppress(OSError):
        content = kept.read_bytes()
        digest, code = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(code).digest() == digest:  # not damaged
            return code
    code = _compiled(source, options, texts)
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=kept.parent) as folder:  # full disk
        written = Path(folder, kept.name)
        written.write_bytes(hashlib.sha256(code).digest() + code)
        written.replace(kept)
    return code


def _compiled(source: str, options: Sequence[str], texts: Mapping[str, bytes]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        texts[source],
        source.encode(),
        len(texts),
        (ctypes.c_char_p * len(texts))(*texts.values()),
        (ctypes.c_char_p * len(texts))(*map(str.encode, texts)),
    )
    if made:
        raise RuntimeError(f"nvrtcCreateProgram failed ({made})")
    flags = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source} does not compile: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@functools.cache
def structure(source: str, name: str, most: int = 0) -> type[ctypes.Structure]:
    """Returns the structure of a kernel's arguments, as the kernel's source declares it.

    Args:
        source: File name of the source.
        name: Name of the structure; its fields are numbers and pointers, or arrays of them.
        most: Value of the macro MOST, the length of arrays.
    """
    text = re.sub("//.*", "", (_FOLDER / source).read_text(encoding="utf-8")).replace("[MOST]", f"[{most}]")
    (body,) = re.findall(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL)
    fields: list[tuple[str, Any]] = []
    for kind, variables in re.findall(r"(?:const )?(\w[\w ]*?\*?) (\w+(?:\[\d+\])?(?:, \w+)*);", body):
        for variable in variables.split(", "):
            field, _, count = variable.rstrip("]").partition("[")
            number: Any = ctypes.c_void_p if kind.endswith("*") else _SCALARS[kind]
            fields.append((field, number * int(count) if count else number))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class Kernel:
    """A compiled kernel on the current device.

    Args:
        code: machine code, see `compiled`.
        name: name of the kernel.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block, at most.
        cluster: blocks of a cluster, all of which run at the same time; 0: blocks that run in any order.
    """

    def __init__(self, code: bytes, name: str, threads: int, shared_bytes: int, cluster: int = 0) -> None:
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), code), "cuModuleLoadData")
        missing = driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode())
        _check(missing, "cuModuleGetFunction")
        _check(driver.cuFuncSetAttribute(self._function, _MOST_SHARED, shared_bytes), "cuFuncSetAttribute")
        self._attributes = (_Attribute * 2)()
        self._attributes[0].id, self._attributes[0].value[0] = _CLUSTER, cluster
        self._attributes[0].value[1] = self._attributes[0].value[2] = 1
        self._attributes[1].id, self._attributes[1].value[0] = _COOPERATIVE, 1
        self._threads, self._cluster = threads, cluster
        self._device = torch.cuda.current_device()

    def _configuration(self, blocks: int, shared_bytes: int, stream: int) -> _Configuration:
        return _Configuration(
            (blocks, 1, 1),
            (self._threads, 1, 1),
            shared_bytes,
            stream,
            self._attributes,
            len(self._attributes) if self._cluster else 0,
        )

    def most_blocks(self, shared_bytes: int) -> int:
        """Returns how many blocks with so much shared memory the device runs at the same time."""
        clusters, chosen = ctypes.c_int(), self._configuration(self._cluster, shared_bytes, 0)
        most = _driver().cuOccupancyMaxActiveClusters
        code = most(ctypes.byref(clusters), self._function, ctypes.byref(chosen))
        _check(code, "cuOccupancyMaxActiveClusters")
        return clusters.value * self._cluster

    def launch(self, blocks: int, shared_bytes: int, argument: ctypes.Structure) -> None:
        """Launches blocks on the current stream of the kernel's device, with one argument."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        with torch.cuda.device(self._device):  # which is not always the current one
            stream = torch.cuda.current_stream().cuda_stream
            chosen = self._configuration(blocks, shared_bytes, stream)
            code = _driver().cuLaunchKernelEx(ctypes.byref(chosen), self._function, parameters, None)
        _check(code, "cuLaunchKernelEx")
