"""Small helpers around files: locations, notices, files and folders that are whole or absent, errors in plain words."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from econmt.errors import InputError, printable, talk


def notice(text: str) -> None:
    """Print one line of talk on stderr, see :func:`~econmt.errors.printable`; stdout belongs to results."""
    talk(f"econmt: {printable(text)}")


def cache_folder() -> Path:
    """Returns econmt's cache folder, see :func:`econmt_ops.dispatch.measurements.cache_folder`."""
    from econmt_ops.dispatch import measurements  # loads torch

    return measurements.cache_folder()


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
        if error.errno == errno.EPIPE:
            raise
        raise InputError(f"{place}: cannot write: {error.strerror or error}") from error


def refuse_pipe(path: Path) -> None:
    """Refuse a named pipe where a file is wanted: opening one waits for a writer, who may never come.

    The pipes that a shell makes for ``<(command)`` have a writer, and no name in a folder.

    Raises:
        InputError: it is one.
    """
    if path.is_fifo() and Path(os.path.realpath(path)).exists():
        raise InputError(f"{path}: a named pipe, not a file; give a file, or its text on standard input")


def sync_folder(folder: Path) -> None:
    """Make the names inside ``folder`` durable (a no-op where folders cannot be opened)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_OPEN_ALREADY = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which is at ``path`` only once the context has ended without an error, whole and synced.

    A file that is there keeps its permissions, and a link goes on leading where it leads. What is no file, such as a
    device or a pipe, is written directly, as are the names that the system gives to what is open already.
    """
    mode = _mode(path)
    if (mode is not None and not stat.S_ISREG(mode)) or str(path).startswith(_OPEN_ALREADY):
        with path.open("wb") as stream:
            yield stream
        return
    place = Path(os.path.realpath(path))
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            if mode is not None:
                with contextlib.suppress(OSError):  # of another user's file, or on a disk without permissions
                    partial.chmod(stat.S_IMODE(mode))
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(place)
        sync_folder(place.parent)
    finally:
        partial.unlink(missing_ok=True)


def _mode(path: Path) -> int | None:
    """Kind and permissions of what a name leads to; None if that is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, sync it, rename it; its folder is made if need be.

    Raises:
        InputError: the operating system refused (see :func:`writing`).
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as stream:
            stream.write(content)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which is at ``folder`` only once the context has ended without an error, whole and synced.

    A folder that was there goes away then, with all in it: the caller has seen to it that it may. What processes that
    were killed left of theirs is removed first.
    """
    folder = Path(os.path.realpath(folder))  # the folder that a link leads to is written anew, beside itself
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    partial, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
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


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        process, _, kind = leftover.name.removeprefix(f".{folder.name}.").partition(".")
        if kind in ("partial", "old") and process.isdigit() and not _is_running(int(process)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return process != os.getpid()
    try:
        os.kill(process, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
