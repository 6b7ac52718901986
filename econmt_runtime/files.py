"""Files of an exported folder: each is a regular file of bounded size, so that reading one always ends."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import IO

from econmt_runtime.errors import RuntimeInputError

LARGEST = 1 << 30
"""Bytes of a file that is read whole."""

AGAIN = "export the model again"
_BLOCK = 1 << 20


def open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file to read. A pipe or a device, which may never end, is refused before it is read.

    Raises:
        RuntimeInputError: naming the file, if it is absent or cannot be opened, or is no regular file.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise RuntimeInputError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RuntimeInputError(f"{path}: not a regular file; {AGAIN}")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, most: int = LARGEST) -> bytes:
    """Reads a regular file of at most ``most`` bytes.

    Raises:
        RuntimeInputError: as :func:`open_regular`; also if the file is larger, or reading it fails.
    """
    with open_regular(path) as file:
        _check_size(path, file, most)
        try:
            return file.read()
        except OSError as error:
            raise RuntimeInputError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error


def checksum(path: Path) -> str:
    """Computes the SHA-256 of a regular file of at most ``LARGEST`` bytes, a block at a time.

    Raises:
        RuntimeInputError: as :func:`read_file`.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        _check_size(path, file, LARGEST)
        try:
            while block := file.read(_BLOCK):
                digest.update(block)
        except OSError as error:
            raise RuntimeInputError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    return digest.hexdigest()


def _check_size(path: Path, file: IO[bytes], most: int) -> None:
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise RuntimeInputError(f"{path}: {size:,} bytes, more than the {most:,} that it may have; {AGAIN}")
