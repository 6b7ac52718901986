"""Ends a process, such as a rank, when the one that started it ends, for whatever reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

LAUNCHER = "ECONMT_LAUNCHER"
"""Environment variable with the launcher's process id."""

_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Makes a rank end when its launcher does; does nothing in other processes.

    Call it before torch is imported. On Linux the kernel sends SIGKILL, which also ends a rank that is stopped or runs
    C code that holds Python's lock; saved states are consistent whenever a rank is killed. Other systems lack this, so
    a thread checks every second whether the parent process has changed. A pipe from the launcher would need no polling,
    but the elastic agent does not pass open files to its processes.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.environ.get(LAUNCHER, str(os.getppid())))


def end_with_parent(parent: str) -> None:
    """Makes this process end when its parent does, the process with this id; see :func:`end_with_launcher`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _end_without(parent)  # which may have ended already
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="econmt-parent").start()


def _watch(launcher: str) -> None:
    while True:
        _end_without(launcher)
        time.sleep(1.0)


def _end_without(launcher: str) -> None:
    if str(os.getppid()) != launcher:
        os._exit(1)
