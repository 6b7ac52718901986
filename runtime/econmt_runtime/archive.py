"""Runtimes in one compressed file: checks of its members, and their extraction to a temporary folder."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from econmt_runtime.errors import RuntimeInputError
from econmt_runtime.files import AGAIN, FILE_NAME, LARGEST, open_regular

MOST_FILES = 1000
"""Largest number of members of a file."""


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Gives the folder of a runtime: ``path``, or for a file a temporary folder with its members.

    The temporary folder is deleted when the block ends; its files that are mapped into memory or loaded as libraries
    by then remain usable. Errors of the block name ``path`` instead of the temporary folder.

    Raises:
        RuntimeInputError: If the file is damaged, has members that it must not have, or cannot be unpacked.
    """
    if not path.is_file():
        yield path
        return
    import tempfile  # imported here, because folders start faster without it

    try:
        holder = tempfile.TemporaryDirectory(prefix="econmt-", ignore_cleanup_errors=True)
    except OSError as error:
        raise RuntimeInputError(f"{path}: cannot be unpacked ({error}); set TMPDIR to a folder") from error
    with holder as temporary:
        if os.name == "nt":  # which deletes no library before library.start has given it up
            atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        try:
            _unpack(path, Path(temporary))
            yield Path(temporary)
        except RuntimeInputError as error:
            raise RuntimeInputError(str(error).replace(temporary, str(path))) from error


def _unpack(path: Path, folder: Path) -> None:
    """Writes the members of a zip file to an empty folder, and nothing outside of it."""
    import zipfile

    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            for member in members:
                if not FILE_NAME.fullmatch(member.filename):
                    raise ValueError(f"{member.filename!r} is not the name of a file")
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{member.filename} is compressed by another method than deflate")
            size = sum(member.file_size for member in members)
            if size > LARGEST or len(members) > MOST_FILES:
                raise ValueError(
                    f"{len(members):,} files of {size:,} bytes, more than the limit of {MOST_FILES:,} files or "
                    f"{LARGEST:,} bytes"
                )
            for member in members:
                target = folder / member.filename
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    copy = target.open("xb")
                except (FileExistsError, NotADirectoryError):
                    raise ValueError(f"{member.filename} is the name of two files") from None
                with copy, archive.open(member) as source:
                    shutil.copyfileobj(source, copy)
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        RuntimeError,
        ValueError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a damaged offset in the file
            raise RuntimeInputError(
                f"{path}: cannot be unpacked to {folder.parent} ({error.strerror or error}); free some space there, or "
                "set TMPDIR to another folder"
            ) from error
        raise RuntimeInputError(
            f"{path}: not a file written by econmt export --runtime, or damaged ({error}); copy it again, or {AGAIN}"
        ) from error
