"""Resident memory of a process by origin.

Only Linux tells which file a page belongs to. The parts are measured, each by who knows it: pages of files by the
system, tensors by PyTorch, other memory of the C library by its own counters, Python's by Python's; what is left of the
pages that belong to no file is free memory that an allocator keeps, stacks of threads and the like. They add up to the
resident set.
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
"""The parts, as they are printed."""


def resident_parts() -> dict[str, int]:
    """Bytes of the resident set of this process by part; empty where the system does not tell."""
    try:
        mapped = _mapped(_MAPS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
    anonymous = mapped.pop("")
    found = {TORCH: mapped[TORCH], LIBRARIES: mapped[LIBRARIES]}
    # In this order, each within what is left: memory that was asked for need not have been touched.
    tensors = tensor_bytes()
    asked = _taken_from_c()
    wanted = {TENSORS: tensors, PYTHON: _python_arenas(), OTHERS: max(0, asked - tensors)}
    for name, size in wanted.items():
        found[name] = min(size, anonymous)
        anonymous -= found[name]
    return {**found, FREE: anonymous}


def tensor_bytes() -> int:
    """Bytes of the storages of all tensors on the CPU that Python knows of, each once."""
    sizes = {}
    for each in gc.get_objects():
        if _has_memory(type(each)) and each.device.type == "cpu" and each.layout == torch.strided:
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None and tensor.layout == torch.strided:
                    memory = tensor.untyped_storage()
                    sizes[memory._cdata] = memory.nbytes()
    return sum(sizes.values())


def _has_memory(kind: type) -> bool:
    """True if tensors of a class have memory of their own.

    Classes with a dispatch of their own have none: fake tensors, which torch.compile leaves alive and whose sizes may
    be symbols that no longer have a value, and tensors that wrap others. An object is not asked for its class, which
    may run code of its own, as that of a lazy module.
    """
    return issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def _mapped(text: str) -> Counter[str]:
    """Resident bytes of the libraries; under "" those of no file, or changed since they were read from one."""
    found: Counter[str] = Counter()
    name = ""
    for line in text.splitlines():
        head, size = _HEAD.match(line), _SIZE.match(line)
        if head is not None:
            name = head[1]
        elif size is not None:
            number = 1024 * int(size[2])
            if size[1] == "Anonymous":
                found[_owner(name)] -= number
                found[""] += number
            else:
                found[_owner(name)] += number
    return found


def _owner(path: str) -> str:
    if not path.startswith("/"):
        return ""
    return TORCH if "/torch/" in path else LIBRARIES


class _Counts(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _taken_from_c() -> int:
    """Bytes that programs have from the C library's allocator; 0 where it does not count."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return 0
    count.restype = _Counts
    counts = count()
    return int(counts.uordblks + counts.hblkhd)


def _python_arenas() -> int:
    """Bytes that Python's own allocator has, which it tells on standard error alone; 0 if it does not."""
    tell = getattr(sys, "_debugmallocstats", None)
    if tell is None:
        return 0
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            tell()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        found = _ARENAS.search(file.read().decode(errors="replace"))
    return 0 if found is None else int(found[1].replace(",", ""))
