"""File helpers: cache location, notices, atomic writing of files and folders, system errors, detection of changes.

A changed file is detected by size, time and a sample at every start, by the whole content on request. A description
holds a file's size, modification time (ns), SHA-256, and the SHA-256 of a sample: the whole file up to 4 MiB, else 256
blocks of 16 KiB, the first, the last and others at offsets drawn with the file's SHA-256 as seed.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import os
import random
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from econmt import errors
from econmt.config import limits
from econmt.errors import InputError, printable, talk


def notice(text: str) -> None:
    """Prints one line for the user on stderr, with --quiet only if it is a warning; stdout is for results."""
    if not errors.quiet or text.startswith("warning: "):
        talk(f"econmt: {printable(text)}")


def cache_folder() -> Path:
    """Returns econmt's cache folder, see :func:`econmt_ops.core.caches.cache_folder`."""
    from econmt_ops.core import caches  # loads torch

    return caches.cache_folder()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Translates operating system errors while ``path`` is written into InputErrors with a remedy."""
    try:
        yield
    except OSError as error:
        where = Path(error.filename) if isinstance(error.filename, str) else path
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            full = "a file is too large" if error.errno == errno.EFBIG else "the disk is full"
            raise InputError(
                f"{path}: {full}; {errors.REMEDIES[error.errno]} and run the same command again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise InputError(f"{path}: no permission to write {where}; choose another folder") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise InputError(
                f"{path}: cannot create this folder, because {where} is a file; choose another name"
            ) from error
        if error.errno == errno.EPIPE:
            raise
        raise InputError(f"{path}: cannot write: {error.strerror or error}") from error


def refuse_pipe(path: Path) -> None:
    """Raises InputError for a named pipe, because opening one blocks until a writer appears.

    Pipes that a shell creates for ``<(command)`` have a writer, and no name in a folder; they are accepted.
    """
    if path.is_fifo() and Path(os.path.realpath(path)).exists():
        raise InputError(f"{path}: a named pipe, not a file; give a file, or its text on standard input")


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that its file names survive a crash (a no-op except on POSIX systems)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_OPEN_FILES = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing that appears at ``path``, complete and synced, only if the context ends without error.

    An existing file keeps its permissions, and a symbolic link is followed. Devices, pipes and names of open files such
    as ``/dev/stdout`` are written directly.
    """
    mode = _mode(path)
    if (mode is not None and not stat.S_ISREG(mode)) or str(path).startswith(_OPEN_FILES):
        with path.open("wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))
    _remove_leftovers(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            if mode is not None:
                with contextlib.suppress(OSError):  # not permitted, or not supported by the file system
                    partial.chmod(stat.S_IMODE(mode))
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
        sync_folder(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """Returns ``st_mode`` of a path; None if it does not exist."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name, syncs and renames it; creates its folder if needed.

    Args:
        path: file to write or replace. content: its bytes.

    Raises:
        InputError: if it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as stream:
            stream.write(content)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Creates a folder to fill that appears at ``folder``, complete and synced, only if the context ends without error.

    An existing folder is then deleted; the caller checks that this is allowed. Leftovers of killed processes are
    removed first.

    Raises:
        InputError: if it cannot be written.
    """
    with writing(folder):
        folder = Path(os.path.realpath(folder))  # follow a link and replace the folder that it points to
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        partial, old = (
            folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("partial", "old")
        )
        partial.mkdir()
        try:
            yield partial
            for path in (*partial.rglob("*"), partial):
                _sync(path)
            replaces = folder.is_dir()
            if replaces:
                folder.rename(old)
            try:
                partial.rename(folder)
            except OSError:
                if replaces:
                    old.rename(folder)
                raise
            sync_folder(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def remove(path: Path) -> None:
    """Removes a file or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f".{path.name}.*"):
        process, _, kind = leftover.name.removeprefix(f".{path.name}.").partition(".")
        number = limits.natural(process)
        if kind in ("partial", "old") and number is not None and not _is_running(number):
            with contextlib.suppress(OSError):
                remove(leftover)


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return process != os.getpid()
    try:
        os.kill(process, 0)  # signal 0 only checks for existence
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


_READ = 1 << 16
_BLOCK = 16 << 10
_BLOCKS = 256
"""Bytes of a block of a sample, and their largest number."""


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


def text_checksum(path: Path, kind: str, *, compressed: bool) -> str:
    """Returns the hexadecimal "sha256", "sha1" or "git" (blob id) of a file, decompressed first if ``compressed``."""
    if kind == "git":
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {sum(map(len, _blocks(path, compressed)))}\0".encode())
    else:
        digest = hashlib.new(kind, usedforsecurity=False)
    for block in _blocks(path, compressed):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path, compressed: bool) -> Iterator[bytes]:
    with cast("IO[bytes]", gzip.open(path, "rb") if compressed else path.open("rb")) as stream:
        while block := stream.read(_READ):
            yield block
