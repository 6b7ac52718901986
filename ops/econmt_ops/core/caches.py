"""Folders for caches: econmt_ops' own, and those of libraries whose default is not safe or needs a home folder."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

_COMPILER = "TORCHINDUCTOR_CACHE_DIR"
_NEED_HOME = {"TRITON_CACHE_DIR": "triton", "MPLCONFIGDIR": "matplotlib", "HF_HOME": "huggingface"}
"""Environment variables of libraries that keep their caches in the home folder, and names of folders in ours."""


def cache_folder() -> Path:
    """Returns ``$ECONMT_CACHE``, or the folder ``econmt`` in the system's cache folder.

    If no such folder can exist, because there is no home folder or it cannot be written, a private one in the folder
    for temporary files serves, also for the libraries of :data:`_NEED_HOME`. A warning says so once: processes that
    this one starts inherit the choice.
    """
    named = os.environ.get("ECONMT_CACHE")
    if named:
        return Path(named)
    folder = _system_folder()
    if folder is not None and _can_exist(folder):
        return folder
    temporary = private_folder(Path(tempfile.gettempdir()) / _with_user("econmt"))
    for variable, name in _NEED_HOME.items():
        os.environ.setdefault(variable, str(temporary / name))
    os.environ["ECONMT_CACHE"] = str(temporary)
    reason = "there is no home folder" if folder is None else f"{folder} cannot be created"
    warnings.warn(
        f"econmt_ops: {reason}, so caches are kept in {temporary}; set HOME or ECONMT_CACHE to keep them elsewhere",
        RuntimeWarning,
        stacklevel=2,
    )
    return temporary


def use_private_compiler_folder() -> None:
    """Sets torch.compile's cache, from which it loads libraries, to a private folder in :func:`cache_folder`.

    A folder that the user has chosen is kept. torch's default is one for temporary files with a name that another user
    can take; torch writes it into the same variable when parts of it are imported.
    """
    named = os.environ.get(_COMPILER)
    if not named or Path(named).name.startswith("torchinductor_"):
        folder = code_folder("inductor")
        os.environ[_COMPILER] = str(folder)
        # Precompiled headers are in torch's default folder whatever the variable says.
        from torch._inductor import codecache

        compiler: Any = codecache
        for name, parts in (("_HEADER_DIR", ("headers",)), ("_HEADER_LOCK_DIR", ("headers", "locks"))):
            if hasattr(compiler, name):  # older versions have none
                setattr(compiler, name, str(folder.joinpath(*parts)))


def code_folder(name: str) -> Path:
    """Creates a private folder in :func:`cache_folder` for code of this user that is executed."""
    return private_folder(cache_folder() / _with_user(name))


def private_folder(path: Path) -> Path:
    """Creates a folder that only this user can write, so that nobody else can place code there.

    If ``path`` exists and another user owns it or may write it, or if it cannot be created, a new temporary folder is
    returned instead.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    return path if _is_private(path) else Path(tempfile.mkdtemp(prefix=f"{path.name}-"))


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    if sys.platform == "win32":
        return stat.S_ISDIR(status.st_mode)
    others_write = stat.S_IWGRP | stat.S_IWOTH
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & others_write
    )


def _with_user(name: str) -> str:
    """Returns a name that other users of a shared folder do not take."""
    return name if sys.platform == "win32" else f"{name}-{os.geteuid()}"


def _system_folder() -> Path | None:
    """Returns the folder ``econmt`` in the system's cache folder; None if there is no home folder to hold it."""
    variable, parts = "XDG_CACHE_HOME", (".cache",)
    if sys.platform == "win32":
        variable, parts = "LOCALAPPDATA", ("AppData", "Local")
    elif sys.platform == "darwin":
        variable, parts = "", ("Library", "Caches")
    base = os.environ.get(variable)
    try:
        return Path(base or Path.home().joinpath(*parts)) / "econmt"
    except RuntimeError:  # neither a variable nor the system's list of users names a home folder
        return None


def _can_exist(folder: Path) -> bool:
    """Returns True if a folder exists or can be created."""
    nearest = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    return nearest == folder or os.access(nearest, os.W_OK | os.X_OK)
