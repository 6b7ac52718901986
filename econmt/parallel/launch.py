"""Starts the processes of ``econmt train --processes N`` on this host, and what is done when one of them ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from econmt.errors import talk
from econmt.parallel.place import RESTARTS
from econmt.parallel.processes import LEFT, LOST, SPOKEN, end_all

_POLL = 0.05
"""Seconds between looks at the processes."""

_GRACE = 8.0
"""Seconds that the others have to leave when one has ended with an error, before they are killed."""

_ENDING = 30.0
"""Seconds in which a rank has to end that is done, or whose work is done by the others."""

_LOOK = 1.0
"""Seconds between looks whether ranks are done."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def launch(arguments: Sequence[str], processes: int, max_restarts: int) -> int:
    """Runs ``econmt ARGUMENTS`` in several processes that train together, again if one of them is lost.

    Args:
        arguments: of the command line, the verb first; they say nothing of the rank, the environment does.
        processes: how many.
        max_restarts: how often all are started again, from the last saved state, after one was lost.

    Returns:
        The exit code: 0, or that of the process that failed first, 1 if it was killed.
    """
    for attempt in range(max_restarts + 1):
        group = _Attempt(arguments, processes, attempt)
        try:
            group.start()
            code, lost = group.wait()
        finally:
            group.end()
        if code == 0 or not lost or attempt == max_restarts:
            break
        talk(f"econmt: all ranks start again from the last saved state ({attempt + 1} of {max_restarts})")
    return code


class _Attempt:
    """The processes, from their start until all have ended; signals that are sent to this one are handed on to them."""

    def __init__(self, arguments: Sequence[str], processes: int, number: int) -> None:
        # Here and not in rank 0, so that the others have where to tell that rank 0 is gone.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._keys = PrefixStore(f"econmt/{number}", self._store)
        self._command = [sys.executable, "-m", "econmt", *arguments]
        self._environments = [
            _environment(rank, processes, self._store.port, number) for rank in range(processes)
        ]
        self._before: dict[signal.Signals, Any] = {}
        self._asked_to_leave = False
        self._done: dict[int, float] = {}
        self._looked = 0.0
        self._killed: set[int] = set()
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts all of them."""
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._hand_on)
        for rank, environment in enumerate(self._environments):
            # In a session of its own, or Ctrl-C would reach it twice.
            self._running[rank] = subprocess.Popen(  # noqa: S603  it is this very command
                self._command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def end(self) -> None:
        """Kills those that are left."""
        for process in self._running.values():
            process.kill()
            process.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> tuple[int, bool]:
        """Until all have ended: the exit code of all, and whether a rank was lost, so that a new start may help."""
        code, until, some_ended = 0, float("inf"), False
        while self._running and time.monotonic() < until:
            time.sleep(_POLL)
            self._end_late(some_ended)
            for rank, process in list(self._running.items()):
                ended = process.poll()
                if ended is None:
                    continue
                del self._running[rank]
                some_ended = True
                if rank in self._killed:
                    continue
                if ended != 0 and code == 0:
                    code = 1 if ended < 0 else ended
                    until = time.monotonic() + _GRACE
                if ended < 0 and not self._asked_to_leave:
                    self._tell(rank, process.pid, -ended)
        lost = code == 1 and not self._asked_to_leave and self._keys.check([LOST])
        return code, lost

    def _end_late(self, some_ended: bool) -> None:
        """Kills ranks that do not end: those that are done, and, where one has ended, all that write nothing."""
        now = time.monotonic()
        if now < self._looked + _LOOK:
            return
        self._looked = now
        for rank, process in self._running.items():
            if rank not in self._done and ((some_ended and rank > 0) or self._keys.check([f"{LEFT}/{rank}"])):
                self._done[rank] = now
            if now > self._done.get(rank, now) + _ENDING and rank not in self._killed:
                self._killed.add(rank)
                process.kill()
                talk(
                    f"econmt: rank {rank} ({socket.gethostname()}, process {process.pid}) did not end within "
                    f"{_ENDING:.0f} s after the run was done: it is killed, and nothing is lost"
                )

    def _tell(self, rank: int, pid: int, number: int) -> None:
        """That a rank was killed, unless why all leave has been told; the others leave without a word."""
        self._keys.set(LOST, "1")
        if self._keys.add(SPOKEN, 1) == 1:
            talk(
                f"econmt: error: rank {rank} ({socket.gethostname()}, process {pid}) was killed by "
                f"{signal.Signals(number).name}; all ranks leave: the same command goes on from the last saved state"
            )
        end_all(self._keys, len(self._environments), told=True, why="a rank was killed")

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked_to_leave = True
        for process in self._running.values():
            process.send_signal(number)


def _environment(rank: int, processes: int, port: int, attempt: int) -> Mapping[str, str]:
    """Who a process is, under the names that torchrun gives."""
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RESTARTS: attempt,
    }
    # A host's own name need not lead to an address on which it listens.
    found = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**found, **os.environ, **{name: str(value) for name, value in own.items()}}
