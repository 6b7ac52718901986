"""Resident memory of a process by origin.

The system reports pages of files (on Linux only), PyTorch reports tensors, the C library and Python report what their
allocators have given out. The remaining pages that belong to no file are free memory that allocators keep, and stacks
of threads. All parts add up to the resident set.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

_MAPS = Path("/proc/self/smaps")
_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)$")
_SIZE = re.compile(r"^(Rss|Anonymous):\s+(\d+) kB$")
_ARENAS = re.compile(r"^\d+ arenas \* \d+ bytes/arena\s*=\s*([\d,]+)$", re.MULTILINE)

TORCH, LIBRARIES, PYTHON, TENSORS, OTHERS, FREE = (
    "PyTorch's libraries",
    "other libraries and the interpreter",
    "Python's objects: modules, code",
    "tensors",
    "what libraries keep for themselves",
    "free but kept by allocators, stacks",
)
"""Names of the parts, as they are printed."""


def resident_parts() -> dict[str, int]:
    """Returns the bytes of this process's resident set by part; empty if the system does not tell."""
    try:
        mapped = _mapped(_MAPS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
    anonymous = mapped.pop("")
    parts = {TORCH: mapped[TORCH], LIBRARIES: mapped[LIBRARIES]}
    # In this order, each at most the remaining pages: allocated memory need not have been touched.
    tensors = tensor_bytes()
    allocated = {TENSORS: tensors, PYTHON: _python_arenas(), OTHERS: max(0, _malloc_bytes() - tensors)}
    for name, size in allocated.items():
        parts[name] = min(size, anonymous)
        anonymous -= parts[name]
    return {**parts, FREE: anonymous}


def tensor_bytes() -> int:
    """Returns the bytes of the storages of all CPU tensors that Python knows, each storage once."""
    sizes = {}
    for candidate in gc.get_objects():
        if (
            _has_memory(type(candidate))
            and candidate.device.type == "cpu"
            and candidate.layout == torch.strided
        ):
            for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
                if tensor is not None and tensor.layout == torch.strided:
                    memory = tensor.untyped_storage()
                    sizes[memory._cdata] = memory.nbytes()
    return sum(sizes.values())


def _has_memory(kind: type) -> bool:
    """Returns True if tensors of a class have their own memory.

    Classes that override ``__torch_dispatch__`` have none: fake tensors, which torch.compile leaves alive and whose
    sizes may be symbols without a value, and tensors that wrap others. It takes the class rather than the object, whose
    attribute ``__class__`` may run code, as in lazy modules.
    """
    return issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def _mapped(text: str) -> Counter[str]:
    """Returns the resident bytes of libraries; under "" those that belong to no file or differ from their file."""
    sizes: Counter[str] = Counter()
    name = ""
    for line in text.splitlines():
        head, size = _HEAD.match(line), _SIZE.match(line)
        if head is not None:
            name = head[1]
        elif size is not None:
            number = 1024 * int(size[2])
            if size[1] == "Anonymous":
                sizes[_owner(name)] -= number
                sizes[""] += number
            else:
                sizes[_owner(name)] += number
    return sizes


def _owner(path: str) -> str:
    if not path.startswith("/"):
        return ""
    return TORCH if "/torch/" in path else LIBRARIES


class _AllocatorCounts(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _malloc_bytes() -> int:
    """Returns the bytes that the C library's allocator has given out; 0 if it does not count them."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return 0
    count.restype = _AllocatorCounts
    counts = count()
    return int(counts.uordblks + counts.hblkhd)


def _python_arenas() -> int:
    """Returns the bytes of Python's allocator, which it prints on standard error only; 0 if it does not."""
    print_statistics = getattr(sys, "_debugmallocstats", None)
    if print_statistics is None:
        return 0
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        standard_error = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            print_statistics()
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
        file.seek(0)
        total = _ARENAS.search(file.read().decode(errors="replace"))
    return 0 if total is None else int(total[1].replace(",", ""))
