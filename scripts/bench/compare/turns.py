"""Training of several toolkits in turns: all processes are alive, one runs, the others are stopped.

The speed of a machine wanders within minutes, so long windows one after the other compare the machine with itself as
much as one toolkit with another. Turns of a few seconds meet the same machine. Each toolkit's process group is stopped
with SIGSTOP and goes on with SIGCONT; its speed is what it did over the time in which it was not stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from .measure import (
    FailedError,
    Finished,
    Mark,
    MemoryWatch,
    Reading,
    end,
    failure,
    marks_of,
    start,
    window_of,
)

LIMIT_SECONDS = 1800.0
"""Running seconds after which a toolkit has failed."""
LAST_SECONDS = 5.0
"""Seconds for a process to end after its output has ended."""


def stop_group(group: int) -> None:
    """Stops all processes of a child's group, and waits until its leader has stopped."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)
        os.waitid(os.P_PID, group, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def continue_group(group: int) -> None:
    """Continues all processes of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGCONT)


class RunningClock:
    """Clock of the seconds in which a process group runs; it halts while the group is stopped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before = 0.0
        self._since: float | None = None
        self._lock = threading.Lock()

    def go(self) -> None:
        """Starts the clock."""
        with self._lock:
            assert self._since is None
            self._since = self._clock()

    def halt(self) -> None:
        """Halts the clock."""
        with self._lock:
            assert self._since is not None
            self._before += self._clock() - self._since
            self._since = None

    def read(self) -> float:
        """Returns the seconds so far."""
        with self._lock:
            return self._before + (0.0 if self._since is None else self._clock() - self._since)


class Trainee:
    """A toolkit's training process, which takes turns with others.

    Its output is read by a thread at all times. A line that is read when the group has just been stopped is of the
    last moment in which it ran, since the clock of its lines stands still from then on.

    Args:
        command, environment, folder, standard_input: see :func:`scripts.bench.compare.measure.start`.
        reading: understands a line of the training log.
        warm_up: updates before the window.
        clock: returns seconds for the id of the process, as the window counts them.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        reading: Callable[[str], Reading | None] = lambda _: None,
        warm_up: int = 0,
        clock: Callable[[int], float] = lambda _: time.monotonic(),
        standard_input: Path | None = None,
    ) -> None:
        self.command = list(command)
        self.clock = RunningClock(lambda: clock(0 if self._process is None else self._process.pid))
        self.ended = False
        self.failed: FailedError | None = None
        self._environment, self._folder = environment, folder
        self._reading, self._warm_up, self._input = reading, warm_up, standard_input
        self._lines: list[str] = []
        self._readings: list[tuple[float, Reading]] = []
        self._peak: int | None = None
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._watch: MemoryWatch | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        """Starts the process."""
        self._process = start(self.command, self._environment, self._folder, self._input)
        self.clock.go()
        self._watch = MemoryWatch(self._process.pid)
        self._watch.__enter__()
        self._reader.start()

    def resume(self) -> None:
        """Continues the process."""
        assert self._process is not None
        assert self._watch is not None
        self.clock.go()
        self._watch.paused = False
        continue_group(self._process.pid)

    def halt(self) -> None:
        """Stops the process."""
        assert self._process is not None
        assert self._watch is not None
        stop_group(self._process.pid)
        self.clock.halt()
        self._watch.paused = True

    def wait(self, seconds: float, *, until_warm: bool = False) -> None:
        """Waits for some seconds, or until its output ends; with ``until_warm`` also until the warm-up is over."""
        with self._changed:
            over = lambda: self.ended or (until_warm and bool(self._marks()))  # noqa: E731
            self._changed.wait_for(over, timeout=max(seconds, 0.0))

    def hear(self, line: str) -> None:
        """Takes in a line of its output."""
        seconds = self.clock.read()
        read = self._reading(line)
        with self._changed:
            self._lines.append(line)
            if read is not None:
                self._readings.append((seconds, read))
                self._peak = None if self._watch is None else self._watch.peak
                self._changed.notify_all()

    def marks(self) -> list[Mark]:
        """Returns its lines past the warm-up, with the seconds in which it ran."""
        with self._changed:
            return self._marks()

    def wants_turns(self, seconds: float) -> bool:
        """Returns True if it can train and its window is shorter than ``seconds``."""
        marks = self.marks()
        return self.can_run and (not marks or marks[-1].seconds < seconds)

    @property
    def can_run(self) -> bool:
        """True if it has neither ended nor failed."""
        return not self.ended and self.failed is None

    def fail(self, cause: str) -> None:
        """Ends it as failed for a cause."""
        self.failed = failure(self.command, self._lines, cause)
        self.close()

    def close(self) -> None:
        """Kills it, stopped or not; after the end of its output it may first end by itself."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        by_itself = self.ended
        if by_itself:
            continue_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_SECONDS)
        end(process)
        code = process.wait()
        if self._watch is not None:
            self._watch.__exit__()
            self._reader.join(LAST_SECONDS)
        if process.stdout is not None and not self._reader.is_alive():
            process.stdout.close()
        if by_itself and code != 0 and self.failed is None:
            self.failed = failure(self.command, self._lines, f"ended with status {code}")

    def result(self) -> Finished | FailedError:
        """Returns the result of a closed trainee."""
        if self.failed is not None:
            return self.failed
        marks, peak = self._marks(), self._peak
        if peak is None:  # it has told nothing of training
            peak = 0 if self._watch is None else self._watch.peak
        return Finished(self._lines, peak, window_of(marks), marks)

    def _marks(self) -> list[Mark]:
        return marks_of(self._readings, self._warm_up)

    def _read(self) -> None:
        assert self._process is not None
        output: IO[str] | None = self._process.stdout
        assert output is not None
        for line in output:
            self.hear(line.rstrip("\n"))
        with self._changed:
            self.ended = True
            self._changed.notify_all()


def run_alone(trainee: Trainee, limit: float = LIMIT_SECONDS) -> Finished | FailedError:
    """Runs a trainee without turns to its end; returns what came of it."""
    try:
        trainee.start()
        trainee.wait(limit)
        if trainee.clock.read() >= limit:
            trainee.fail(f"took over {limit:.0f} s")
    finally:
        trainee.close()
    result = trainee.result()
    return result if isinstance(result, FailedError) else result._replace(marks=())


def write_log(finished: Finished | FailedError, log: Path) -> Finished:
    """Writes what a command printed to a file; raises the error if it failed."""
    lines = [str(finished)] if isinstance(finished, FailedError) else finished.lines
    log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if isinstance(finished, FailedError):
        raise finished
    return finished


def train_in_turns(
    trainees: Mapping[str, Trainee], seconds: float, turn: float, limit: float = LIMIT_SECONDS
) -> dict[str, Finished | FailedError]:
    """Train until every window is ``seconds`` long, never two at once; one that fails does not end the others.

    Args:
        trainees: by name, in the order of their turns. Each is started and warmed up alone, the others being stopped.
        seconds: of running in a window. All take turns until the last has that, so windows lie in the same cycles.
        turn: seconds of a turn.
        limit: seconds of running, warm-up included, after which one whose window is not full has failed.

    Returns:
        What came of each, by name. All processes have ended then, and also if this raises.
    """
    everyone = list(trainees.values())
    with contextlib.ExitStack() as stack:
        for trainee in everyone:
            stack.callback(trainee.close)
            trainee.start()
            trainee.wait(limit, until_warm=True)
            trainee.halt()
            if trainee.can_run and not trainee.marks():
                trainee.fail(f"took over {limit:.0f} s to warm up")
        take_turns(everyone, seconds, turn, limit)
    return {name: trainee.result() for name, trainee in trainees.items()}


def take_turns(trainees: Sequence[Trainee], seconds: float, turn: float, limit: float) -> None:
    """Runs stopped trainees one after the other, cycle after cycle; see :func:`train_in_turns`."""
    while any(trainee.wants_turns(seconds) for trainee in trainees):
        for trainee in trainees:
            if not trainee.can_run:
                continue
            trainee.resume()
            trainee.wait(turn)
            trainee.halt()
            if trainee.wants_turns(seconds) and trainee.clock.read() > limit:
                trainee.fail(f"took over {limit:.0f} s")
