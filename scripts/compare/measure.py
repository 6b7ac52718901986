"""Runs a toolkit's command, reads its log as it comes, and watches the memory of its processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SAMPLE_SECONDS = 0.1
_STATUS_LINE = re.compile(r"^(VmHWM|VmRSS):\s+(\d+) kB$", re.MULTILINE)


class Reading(NamedTuple):
    """One line of a training log: updates so far, and target tokens a second since the line before."""

    update: int
    tokens_per_second: float


class Window(NamedTuple):
    """What was measured of a training run: updates and seconds of wall time, and target tokens a second in them."""

    updates: int
    seconds: float
    tokens_per_second: float


class FailedError(Exception):
    """A command ended badly; the message has the end of what it printed."""


def measured_window(readings: Sequence[tuple[float, Reading]], warm_up: int) -> Window | None:
    """Throughput after ``warm_up`` updates, or None before there are two readings past it.

    Args:
        readings: pairs of the clock, in seconds, when the line arrived, and what it said.
        warm_up: updates left out at the start.

    Each line speaks of the time since the line before, so lines count by that time; the first line at or past
    the warm-up only starts the window.
    """
    inside = [(clock, reading) for clock, reading in readings if reading.update >= warm_up]
    if len(inside) < 2:
        return None
    spans = [after - before for (before, _), (after, _) in itertools.pairwise(inside)]
    seconds = sum(spans)
    if seconds <= 0.0:
        return None
    tokens = sum(
        span * reading.tokens_per_second for span, (_, reading) in zip(spans, inside[1:], strict=True)
    )
    return Window(inside[-1][1].update - inside[0][1].update, seconds, tokens / seconds)


def resident_bytes(status: str) -> tuple[int, int]:
    """Resident memory now and at its highest, in bytes, from the text of ``/proc/PID/status``."""
    sizes = {name: 1024 * int(size) for name, size in _STATUS_LINE.findall(status)}
    return sizes.get("VmRSS", 0), sizes.get("VmHWM", 0)


class MemoryWatch:
    """Follows the resident memory of a process and all its descendants.

    The peak is the largest sum over the processes seen in one look, or the highest mark that the kernel keeps for
    a single one of them, whichever is more: with one process it is exact.
    """

    def __init__(self, process: int) -> None:
        self.peak = 0
        self._process = process
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            sizes = [_process_memory(process) for process in process_tree(self._process)]
            self.peak = max([self.peak, sum(now for now, _ in sizes), *(highest for _, highest in sizes)])


def process_tree(root: int) -> list[int]:
    """The ids of a process and its descendants, also of those their parents start on other threads."""
    found = [root]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(word) for word in children.read_text(encoding="ascii").split()]
    return found


def _process_memory(process: int) -> tuple[int, int]:
    try:
        return resident_bytes(Path(f"/proc/{process}/status").read_text(encoding="utf-8"))
    except OSError:
        return 0, 0


class Finished(NamedTuple):
    """A command that was run: what it printed, its training window if it has one, and its peak resident memory.

    The peak is that of training: what comes after the last line of the training log, as validation, is not in it.
    """

    lines: list[str]
    seconds: float
    peak_bytes: int
    window: Window | None


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    reading: Callable[[str], Reading | None] | None = None,
    warm_up: int = 0,
    window_seconds: float | None = None,
    limit: float = 1800.0,
    standard_input: Path | None = None,
) -> Finished:
    """Run a command to its end, or until its log shows a window of ``window_seconds``.

    Args:
        command: program and arguments; standard error is read with standard output.
        environment: variables added to this process's.
        folder: working directory.
        reading: understands a line of the training log; None for commands that do not train.
        warm_up: updates before the window.
        window_seconds: length of the window after which the command is stopped; None: let it end.
        limit: seconds after which the command has failed.
        standard_input: file given as standard input.

    Raises:
        FailedError: the command ended with an error, or took longer than ``limit``.
    """
    lines: list[str] = []
    readings: list[tuple[float, Reading]] = []
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(standard_input.open("rb")) if standard_input else subprocess.DEVNULL
        began = time.monotonic()
        process = subprocess.Popen(
            list(command),
            cwd=folder,
            env={**os.environ, **environment},
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            start_new_session=True,
        )
        watch = MemoryWatch(process.pid)
        stack.enter_context(watch)
        stack.callback(_end, process)  # whatever happens here, nothing is left running
        timer = threading.Timer(limit, _end, [process])
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        assert process.stdout is not None
        stack.enter_context(process.stdout)
        stopped, window, peak = False, None, None
        for line in process.stdout:
            clock = time.monotonic()
            lines.append(line.rstrip("\n"))
            read = reading(lines[-1]) if reading is not None else None
            if read is None or stopped:
                continue
            readings.append((clock, read))
            peak = watch.peak
            window = measured_window(readings, warm_up)
            if window_seconds is not None and window is not None and window.seconds >= window_seconds:
                stopped = True
                _end(process)
        code = process.wait()
    seconds = time.monotonic() - began
    if code != 0 and not stopped:
        shown = "\n  ".join(lines[-25:])
        cause = f"took over {limit:.0f} s" if seconds >= limit else f"ended with status {code}"
        raise FailedError(f"{' '.join(command)}\n{cause}; the end of its output:\n  {shown}")
    return Finished(lines, seconds, watch.peak if peak is None else peak, window)


def _end(process: subprocess.Popen[str]) -> None:
    """End the command and what it started: all that is in its own session."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
