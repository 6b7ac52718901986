"""Small helpers around files: locations, notices, atomic writing, and operating-system errors in plain words."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from econmt.errors import InputError


def notice(text: str) -> None:
    """Print one line of talk on stderr; stdout belongs to results."""
    print(f"econmt: {text}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """``$ECONMT_CACHE`` or ``~/.cache/econmt``."""
    chosen = os.environ.get("ECONMT_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "econmt"


def data_cache() -> Path:
    """The folder of downloaded and generated text inside the cache folder."""
    return cache_folder() / "data"


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn the operating system's errors while ``place`` is written into one clear line.

    Raises:
        InputError: no permission, no space, a file where a folder is needed, a read-only or broken disk.
    """
    try:
        yield
    except OSError as error:
        where = Path(error.filename) if isinstance(error.filename, str) else place
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"{place}: the disk is full; free some space and run the same command again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise InputError(f"{place}: no permission to write {where}; choose another folder") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise InputError(
                f"{place}: cannot make this folder, {where} is a file; choose another name"
            ) from error
        raise InputError(f"{place}: cannot write: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Make the names inside ``folder`` durable (a no-op where folders cannot be opened)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which is at ``path`` only once the context has ended without an error, whole and synced."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, sync it, rename it; its folder is made if need be.

    Raises:
        InputError: the operating system refused (see :func:`writing`).
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as stream:
            stream.write(content)
