"""Whether a file is the one that was written down: by size and time and a sample at every start, by all of it if asked.

A description has the file's size, time of change (ns), SHA-256, and the SHA-256 of a sample of it: all of a file of up
to 4 MiB, else 256 blocks of 16 KiB, the first, the last and others at places drawn with the file's own SHA-256 as a
key. A description that an earlier version wrote has no sample.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from econmt.data.text.download import text_checksum
from econmt.errors import InputError

_BLOCK = 16 << 10
_BLOCKS = 256


def describe(path: Path) -> dict[str, Any]:
    """Reads all of a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        status = path.stat()
        whole = text_checksum(path, "sha256", compressed=False)
        return {
            "size": status.st_size,
            "time": status.st_mtime_ns,
            "sha256": whole,
            "sample": sample(path, whole),
        }
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error


def sample(path: Path, key: str) -> str:
    """SHA-256 of the blocks of a file that ``key`` chooses."""
    size = path.stat().st_size
    places = [0]
    length = size
    if size > _BLOCK * _BLOCKS:
        draw = random.Random(key)
        length = _BLOCK
        last = size - _BLOCK
        places = sorted({0, last, *(draw.randrange(last) for _ in range(_BLOCKS - 2))})
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        for place in places:
            stream.seek(place)
            digest.update(stream.read(length))
    return digest.hexdigest()


def is_as_described(path: Path, description: Mapping[str, Any], *, verify: bool) -> bool:
    """Whether a file has the content that its description was made of.

    Args:
        path: the file.
        description: see :func:`describe`.
        verify: read all of it even if size, time and sample are the same. With another time it is read in any case:
            a copy has one.

    Raises:
        InputError: it cannot be read.
    """
    try:
        status = path.stat()
        if status.st_size != description["size"]:
            return False
        if verify or status.st_mtime_ns != description["time"]:
            return bool(text_checksum(path, "sha256", compressed=False) == description["sha256"])
        return bool(
            "sample" not in description or sample(path, description["sha256"]) == description["sample"]
        )
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error
