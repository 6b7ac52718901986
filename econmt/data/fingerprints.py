"""Detection of changed files: by size, time and a sample at every start, by the whole content on request.

A description holds a file's size, modification time (ns), SHA-256, and the SHA-256 of a sample: the whole file up to
4 MiB, else 256 blocks of 16 KiB, the first, the last and others at offsets drawn with the file's SHA-256 as seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from econmt.data.text.download import text_checksum
from econmt.errors import InputError

_BLOCK = 16 << 10
_BLOCKS = 256


def describe(path: Path) -> dict[str, Any]:
    """Returns the description of a file: a dictionary for JSON with size, time and checksums; reads it completely.

    Raises:
        InputError: if it cannot be read.
    """
    with _reading(path):
        status = path.stat()
        checksum = text_checksum(path, "sha256", compressed=False)
        times = {"size": status.st_size, "time": status.st_mtime_ns}
        return {**times, "sha256": checksum, "sample": sample(path, checksum)}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Translates operating system errors while a file is read into InputErrors."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error


def sample(path: Path, key: str) -> str:
    """Returns the SHA-256 of blocks of a file, drawn with the seed ``key``."""
    size = path.stat().st_size
    offsets = [0]
    length = size
    if size > _BLOCK * _BLOCKS:
        draw = random.Random(key)
        length = _BLOCK
        last = size - _BLOCK
        offsets = sorted({0, last, *(draw.randrange(last) for _ in range(_BLOCKS - 2))})
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        for offset in offsets:
            stream.seek(offset)
            digest.update(stream.read(length))
    return digest.hexdigest()


def is_as_described(path: Path, description: Mapping[str, Any], *, verify: bool) -> bool:
    """Returns True if a file still has the described content.

    Args:
        path: the file. description: result of :func:`describe`.
        verify: True reads the whole file even if size, time and sample are equal. A file with another time, such as a
            copy, is always read.

    Raises:
        InputError: if it cannot be read.
    """
    checksum = str(description["sha256"])
    with _reading(path):
        status = path.stat()
        if status.st_size != description["size"]:
            return False
        if verify or status.st_mtime_ns != description["time"]:
            return text_checksum(path, "sha256", compressed=False) == checksum
        return sample(path, checksum) == str(description["sample"])
