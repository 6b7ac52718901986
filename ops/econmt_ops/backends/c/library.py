"""Loader of the C library, and the structures of its kernels' arguments, which it reads from kernels.h."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_VERSION = 11
"""Version that econmt_version in kernels.c returns."""

_HEADER = Path(__file__).with_name("kernels.h")

_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p

_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "void": (torch.float32, torch.bfloat16),
    "float": (torch.float32,),
    "double": (torch.float64,),
    "int64_t": (torch.int64,),
    "int32_t": (torch.int32,),
    "int8_t": (torch.int8,),
    "uint8_t": (torch.bool, torch.uint8),
}
"""Types of tensors by the C type that a pointer points to."""


class TensorField(NamedTuple):
    """Field of a structure that takes a tensor.

    Attributes:
        dtypes: Types of the tensor.
        is_value: True if it has the type of the kernel's other values: float32, or bfloat16.
        is_written: True if the kernel may write it.
        strides: Fields of the strides of its first axes, if the kernel needs the last axis to be contiguous only.
    """

    dtypes: tuple[torch.dtype, ...]
    is_value: bool
    is_written: bool
    strides: tuple[str, ...]

    def in_layout(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, or a copy if it is only read and its memory layout does not fit."""
        assert tensor.dtype in self.dtypes
        fits = (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1) if self.strides else tensor.is_contiguous()
        if fits:
            return tensor
        assert not self.is_written
        return tensor.contiguous()


class Structure(NamedTuple):
    """Arguments of a kernel: the structure of ctypes, and its fields that take tensors, by name."""

    kind: type[ctypes.Structure]
    tensors: dict[str, TensorField]


_NESTED = re.compile(r"struct (\w+) \w+;")
"""Field of a structure that is a structure itself; its fields count as those of the outer one."""


def structures() -> dict[str, Structure]:
    """Reads the structures of kernels.h by name.

    Raises:
        OSError: The file is missing.
    """
    text = re.sub(r"/\*.*?\*/", "", _HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    bodies = dict(re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL))
    inner = set(_NESTED.findall(text))
    return {
        name: _structure(name, _NESTED.sub(lambda field: bodies[field[1]], body))
        for name, body in bodies.items()
        if name not in inner
    }


def _structure(name: str, body: str) -> Structure:
    """Returns a structure, given the C declarations of its fields."""
    kinds: list[tuple[str, Any]] = []
    pointers: dict[str, tuple[str, bool]] = {}
    for constant, kind, variables in re.findall(r"(const )?((?:struct )?\w+) ([^;]+);", body):
        for variable in variables.replace("(void)", "").split(","):
            field = variable.strip(" *()")
            if "*" in variable:
                pointers[field] = kind, not constant
                kinds.append((field, _POINTER))
            else:
                kinds.append((field, ctypes.c_float if kind == "float" else _SIZE))
    names = {field for field, _ in kinds}
    tensors = {}
    for field, (kind, is_written) in pointers.items():
        strides = tuple(
            axis for axis in (f"{field}_{end}" for end in ("stride", "batch", "step")) if axis in names
        )
        if kind in _DTYPES:
            tensors[field] = TensorField(_DTYPES[kind], kind == "void", is_written, strides)
    return Structure(type(name, (ctypes.Structure,), {"_fields_": kinds}), tensors)


class Library:
    """The loaded C library, and whether it uses PyTorch's OpenMP threads.

    Attributes:
        structures: Structures of kernels.h by name.
        functions: Kernels by the name of their structure.
        has_threads: True if kernels run on PyTorch's threads.
        level: Instruction set level in use, see kernels.c.
        multiplies: Types of the matrices that it multiplies on this processor.
    """

    def __init__(self, path: Path, most: int = 3) -> None:
        """Loads the library.

        Args:
            path: file of the library.
            most: highest instruction set level to use, see kernels.c.

        Raises:
            ImportError: it was built from other sources.
            OSError: it is not a library for this machine, or kernels.h is missing.
        """
        library: Any = ctypes.CDLL(str(path))
        self.structures = structures()
        if not _fits(library, self.structures):
            raise ImportError(f"{path} was built from sources of another version")
        threads = _openmp()
        self.has_threads = threads is not None
        library.econmt_start.argtypes = [_POINTER] * 3 + [ctypes.c_int]
        self.level: int = library.econmt_start(*(threads or (None, None, None)), most)
        self.multiplies = frozenset(
            dtype
            for exact, dtype in enumerate((torch.bfloat16, torch.float32))
            if library.econmt_has_products(exact)
        )
        self.functions: dict[str, Any] = {}
        for name, structure in self.structures.items():
            function = getattr(library, f"econmt_{name}", None)
            if function is not None:
                function.argtypes = [ctypes.POINTER(structure.kind), _SIZE]
                function.restype = ctypes.c_int
                self.functions[name] = function


def _fits(library: Any, expected: dict[str, Structure]) -> bool:
    """Returns True if the library has the expected version and structures."""
    try:
        version, size = library.econmt_version, library.econmt_size
    except AttributeError:
        return False
    size.argtypes, size.restype = [ctypes.c_char_p], _SIZE
    sizes = {name: ctypes.sizeof(structure.kind) for name, structure in expected.items()}
    return version() == _VERSION and all(size(name.encode()) == bytes_ for name, bytes_ in sizes.items())


def _openmp() -> tuple[int, int, int] | None:
    """Returns addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads in PyTorch's OpenMP runtime."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).is_file():
            torch_library: Any = ctypes.CDLL(str(folder / name))  # also resolves symbols of its dependencies
            try:
                addresses = [
                    ctypes.cast(getattr(torch_library, symbol), _POINTER).value
                    for symbol in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
                ]
            except AttributeError:
                return None
            start, number, count = addresses
            return (start, number, count) if start and number and count else None
    return None
