"""Reading of an exported folder's files: regular files of bounded size only, so that every read ends."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from econmt_runtime.errors import RuntimeInputError

LARGEST = 1 << 30
"""Largest size, in bytes, of a file that is read as a whole."""

FILE_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)
"""Names of files below a folder, from which none leads out of it."""

AGAIN = "export the model again"
_BLOCK = 1 << 20


def open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file for reading; pipes and devices, which may never end, are refused.

    Raises:
        RuntimeInputError: If the file is absent, cannot be opened or is not a regular file; the message names it.
    """
    if "\0" in str(path):
        raise RuntimeInputError(f"{path}: no file's name has a NUL character; remove it")
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise RuntimeInputError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RuntimeInputError(f"{path}: not a regular file; {AGAIN}")
    return os.fdopen(descriptor, "rb")


def read_blocks(path: Path, most: int = LARGEST) -> Iterator[bytes]:
    """Yields the content of a regular file of at most ``most`` bytes, a block at a time.

    Raises:
        RuntimeInputError: As :func:`open_regular`; also if the file is larger, or reading it fails.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise RuntimeInputError(f"{path}: {size:,} bytes, more than the limit of {most:,}; {AGAIN}")
        try:
            while block := file.read(_BLOCK):
                yield block
        except OSError as error:
            raise RuntimeInputError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error


def read_file(path: Path, most: int = LARGEST) -> bytes:
    """Reads a file as a whole; see :func:`read_blocks`."""
    return b"".join(read_blocks(path, most))


def checksum(path: Path) -> str:
    """Computes the SHA-256 of a file; see :func:`read_blocks`."""
    digest = hashlib.sha256()
    for block in read_blocks(path):
        digest.update(block)
    return digest.hexdigest()
