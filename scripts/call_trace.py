"""Records which functions of a repository each test calls, in the test's process and in those that it starts.

`scripts/mutate.py` copies this file to the root of a copy of the repository as sitecustomize.py. Every Python process
with that root on its path imports it, and pytest loads it as a plugin, too. The environment variable CALL_TRACE is the
folder of the records; without it nothing is recorded. Lines of the records, fields separated by tabs:

    calls     test, file, function     for each function that a test calls
    seconds   test, seconds            for each phase of a test
    failed    test                     for each test that fails
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = os.environ.get("CALL_TRACE")
_ROOT = str(Path(__file__).resolve().parent) + os.sep
_recorded: set[tuple[str, CodeType]] = set()
_open, _write, _close = os.open, os.write, os.close  # tests replace the module's functions


def _append(name: str, line: str) -> None:
    """Adds a line to a file of the folder; lines of several processes do not mix."""
    descriptor = _open(f"{FOLDER}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _write(descriptor, line.encode())
    _close(descriptor)


def _note(frame: FrameType, event: str, _argument: Any) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(_ROOT):
        # pytest sets the variable to "test (phase)"; processes that the test starts inherit it.
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if test and (test, code) not in _recorded:
            _recorded.add((test, code))
            _append("calls", f"{test}\t{code.co_filename[len(_ROOT) :]}\t{code.co_name}\n")


def pytest_runtest_logreport(report: Any) -> None:
    """Records a test's phase, in the process that reports to the user."""
    if FOLDER and "PYTEST_XDIST_WORKER" not in os.environ:
        _append("seconds", f"{report.nodeid}\t{report.duration}\n")
        if report.failed:
            _append("failed", f"{report.nodeid}\n")


def pytest_collectreport(report: Any) -> None:
    """Records a file of tests that cannot be imported."""
    if FOLDER and report.failed:
        _append("failed", f"{report.nodeid}\n")


if FOLDER:
    threading.setprofile(_note)
    sys.setprofile(_note)
