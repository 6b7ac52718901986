"""Running of a toolkit's command: its log is read as it comes, and the memory of its processes is sampled."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

SAMPLE_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl
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
            if not self.paused:
                self.peak = max(self.peak, self._look())

    def _look(self) -> int:
        sizes = [process_memory(process) for process in process_tree(self._process)]
        return max(sum(now for now, _ in sizes), *(highest for _, highest in sizes))


class DeviceMemoryWatch(MemoryWatch):
    """Follows the memory in use on the first visible NVIDIA GPU, without what was in use when the watch was made.

    The driver counts contexts, libraries and what allocators hold. Of several processes on the GPU it gives the sum.
    """

    def __init__(self) -> None:
        from econmt.engine.outside_memory import (
            taken_by_all,  # imports torch, which other watchers do without
        )

        super().__init__(0)
        self._used = partial(taken_by_all, 0)
        self._before = self._used()

    def _look(self) -> int:
        return self._used() - self._before


def process_tree(root: int) -> list[int]:
    """Returns the ids of a process and its descendants, also of those started by other threads."""
    found = [root]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(word) for word in children.read_text(encoding="ascii").split()]
    return found


def process_memory(process: int) -> tuple[int, int]:
    """Returns current and highest resident memory of a process in bytes; 0 if it is gone."""
    try:
        return resident_bytes(Path(f"/proc/{process}/status").read_text(encoding="utf-8"))
    except OSError:
        return 0, 0


def processor_seconds(process: int) -> float:
    """Returns the processor time of a process and its descendants so far, those included that have ended."""
    ticks = 0
    for each in process_tree(process):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


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
    """Starts a command in a session of its own, with its output and errors in one pipe.

    The kernel kills it when this process ends, for whatever reason: what is stopped cannot end itself.
    """
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
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )


def failure(command: Sequence[str], lines: Sequence[str], cause: str) -> FailedError:
    """Returns the error of a command that failed for ``cause``, with the end of its output."""
    shown = "\n  ".join(lines[-25:])
    return FailedError(f"{' '.join(command)}\n{cause}; the end of its output:\n  {shown}")


def end(process: subprocess.Popen[str]) -> None:
    """Kills all processes in the command's session, stopped ones too."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
