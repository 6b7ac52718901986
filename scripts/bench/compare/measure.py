"""Running of a toolkit's command: its log is read as it comes, and the memory of its processes is sampled."""

from __future__ import annotations

import contextlib
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
    """Updates so far, and target tokens since the line before, as one line of a training log tells them."""

    update: int
    tokens: float


class Mark(NamedTuple):
    """Updates, running seconds and target tokens (``</s>`` counted) from the first line of the window to this one."""

    updates: int
    seconds: float
    tokens: float


class Window(NamedTuple):
    """Updates of a measured stretch of training, its running seconds and target tokens a second."""

    updates: int
    seconds: float
    tokens_per_second: float


class FailedError(Exception):
    """Error of a command that failed, with the end of its output."""


def marks_of(readings: Sequence[tuple[float, Reading]], warm_up: int) -> list[Mark]:
    """Returns the lines past ``warm_up`` updates, relative to the first of them.

    ``readings`` are clocks in seconds with the readings that arrived then. The first line past the warm-up only starts
    the window, since its tokens lie before it.
    """
    inside = [(clock, reading) for clock, reading in readings if reading.update >= warm_up]
    if not inside:
        return []
    began, first = inside[0]
    marks, tokens = [Mark(0, 0.0, 0.0)], 0.0
    for clock, reading in inside[1:]:
        tokens += reading.tokens
        marks.append(Mark(reading.update - first.update, clock - began, tokens))
    return marks


def window_of(marks: Sequence[Mark]) -> Window | None:
    """Returns the throughput from the first mark to the last; None before there are two."""
    if not marks or marks[-1].seconds <= 0.0:
        return None
    updates, seconds, tokens = marks[-1]
    return Window(updates, seconds, tokens / seconds)


def resident_bytes(status: str) -> tuple[int, int]:
    """Reads current and highest resident memory in bytes from the text of ``/proc/PID/status``."""
    sizes = {name: 1024 * int(size) for name, size in _STATUS_LINE.findall(status)}
    return sizes.get("VmRSS", 0), sizes.get("VmHWM", 0)


class MemoryWatch:
    """Follows the resident memory of a process and all its descendants.

    The peak is the largest sum over the processes seen in one look, or the highest mark that the kernel keeps for
    a single one of them, whichever is more: with one process it is exact.

    Attributes:
        peak: in bytes.
        paused: do not look: it costs the cores a little, and stopped processes take no more memory.
    """

    def __init__(self, process: int) -> None:
        self.peak = 0
        self.paused = False
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
            if self.paused:
                continue
            sizes = [_process_memory(process) for process in process_tree(self._process)]
            self.peak = max([self.peak, sum(now for now, _ in sizes), *(highest for _, highest in sizes)])


def process_tree(root: int) -> list[int]:
    """Returns the ids of a process and its descendants, also of those started by other threads."""
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


def available_bytes() -> int | None:
    """Returns the memory available without swapping in bytes; None where the kernel does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else None


class Finished(NamedTuple):
    """Output of a command, its peak resident memory in bytes, and its training window.

    The peak is that of training, up to the last line of the training log. Marks exist for training in turns.
    """

    lines: list[str]
    peak_bytes: int
    window: Window | None
    marks: Sequence[Mark] = ()


def start(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, standard_input: Path | None = None
) -> subprocess.Popen[str]:
    """Starts a command in a session of its own, with its output and errors in one pipe."""
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(standard_input.open("rb")) if standard_input else subprocess.DEVNULL
        return subprocess.Popen(
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


def failure(command: Sequence[str], lines: Sequence[str], cause: str) -> FailedError:
    """Returns the error of a command that failed for ``cause``, with the end of its output."""
    shown = "\n  ".join(lines[-25:])
    return FailedError(f"{' '.join(command)}\n{cause}; the end of its output:\n  {shown}")


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
        command, environment, folder, standard_input: see :func:`start`.
        reading: understands a line of the training log; None for commands that do not train.
        warm_up: updates before the window.
        window_seconds: length of the window after which the command is stopped; None: let it end.
        limit: seconds after which the command has failed.

    Raises:
        FailedError: the command ended with an error, or took longer than ``limit``.
    """
    lines: list[str] = []
    readings: list[tuple[float, Reading]] = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        process = start(command, environment, folder, standard_input)
        stack.callback(end, process)  # whatever happens here, nothing is left running
        watch = MemoryWatch(process.pid)
        stack.enter_context(watch)
        timer = threading.Timer(limit, end, [process])
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
            window = window_of(marks_of(readings, warm_up))
            if window_seconds is not None and window is not None and window.seconds >= window_seconds:
                stopped = True
                end(process)
        code = process.wait()
    if code != 0 and not stopped:
        long = time.monotonic() - began >= limit
        raise failure(command, lines, f"took over {limit:.0f} s" if long else f"ended with status {code}")
    return Finished(lines, watch.peak if peak is None else peak, window)


def end(process: subprocess.Popen[str]) -> None:
    """Kills all processes in the command's session, stopped ones too."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
