"""Starts the ranks of ``econmt train --processes N`` on this host, with PyTorch's elastic agent.

The agent, which is also torchrun's, starts the processes, tells each its rank, watches them and starts all again. This
module adds what it lacks: one line that names a rank that was killed; time to save for ranks that were told to leave
(the agent sends SIGTERM to all as soon as one has left, and kills them after 30 s); no new start after an error that
would come again; exit codes; and a store that no other host can reach.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from econmt.errors import talk
from econmt.parallel.orphans import LAUNCHER
from econmt.parallel.processes import LOST

_COMMAND = ("-m", "econmt")
"""Arguments of Python before those of the command line."""

_POLL = 0.05
"""Seconds between looks at the processes."""

_GRACE = 8.0
"""Seconds that the others have to leave after one has ended with an error; then they are killed."""

_GRACE_LOST = 2.0
"""Seconds of grace after a rank was lost; the others only have to report it."""

_CONNECTING = 30
"""Seconds in which the store answers."""


def launch(arguments: Sequence[str], processes: int, max_restarts: int) -> int:
    """Runs ``econmt ARGUMENTS`` in several processes that train together; starts all again if one of them is lost.

    Args:
        arguments: words of the command line, the verb first. They do not name the rank; the environment does.
        processes: number of processes.
        max_restarts: how often all are started again from the last saved state.

    Returns:
        The exit code: 0, or that of the process that failed first; 1 if it was killed.
    """
    silenced = logging.getLogger("torch.distributed.elastic")  # econmt prints one line instead
    silenced.addHandler(logging.NullHandler())
    silenced.propagate = False
    os.environ[LAUNCHER] = str(os.getpid())
    if sys.platform == "linux":  # the host's own name may lead to an address on which it does not listen
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # torch's default, not the agent's
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT")  # others would undo nohup
    words = [word.replace("$", "$$") for word in arguments]  # the agent fills in ${local_rank}
    agent = _Agent(
        WorkerSpec(
            role="econmt",
            local_world_size=processes,
            entrypoint=sys.executable,
            args=(*_COMMAND, *words),
            rdzv_handler=_Loopback(
                "127.0.0.1", 0, rank=0, world_size=1, run_id="econmt", timeout=_CONNECTING
            ),
            max_restarts=max_restarts,
            monitor_interval=_POLL,
        )
    )
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        agent.run()
    except SignalException as received:  # while the processes were being started
        return 128 + received.sigval
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return agent.code


class _Loopback(StaticTCPRendezvous):
    """Rendezvous of one agent, with a new store at each start. It listens on the loopback interface alone."""

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server(("127.0.0.1", 0))
        self.master_port = listener.getsockname()[1]
        self._store = TCPStore(
            self.master_addr,
            self.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            use_libuv=False,  # with it torch 2.7 takes no socket
            master_listen_fd=listener.detach(),
        )
        return super().next_rendezvous()


class _Agent(LocalElasticAgent):
    """Elastic agent of one host.

    Args:
        spec: what to start.

    Attributes:
        code: exit code of the last start.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self.code = 0
        self._max_restarts = spec.max_restarts
        self._signals: list[int] = []
        self._told_to_leave = self._lost = False
        self._until = float("inf")

    def _construct_event(self, *_: Any, **__: Any) -> Event:
        """Replaces an event that nobody reads; the agent would look up the host's name, which takes long offline."""
        return Event("econmt", EventSource.AGENT)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.code, self._until = 0, float("inf")
        kept = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
        found: dict[int, Any] = super()._start_workers(worker_group)
        for number, handler in kept.items():  # agents before torch 2.9 handle them all
            signal.signal(number, handler)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)
        return found

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Looks after the processes; hands on signals, and names a rank that was killed."""
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        ranks = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        while self._signals:
            self._told_to_leave = True
            number = self._signals.pop(0)
            for process in ranks.values():
                process.send_signal(number)
        codes = {rank: process.poll() for rank, process in ranks.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            if self._until == float("inf"):
                rank, code = min(failed.items(), key=lambda each: each[1])  # one that was killed, if any
                self._lost = not self._told_to_leave and (code < 0 or code == LOST)
                killed = 128 - code if self._told_to_leave else 1  # by the signal that told it
                self.code = killed if code < 0 else 1 if code == LOST else code
                self._until = time.monotonic() + (_GRACE_LOST if self._lost else _GRACE)
                if self._lost and code < 0:
                    self._until = 0.0  # the others only wait for it
                    name = signal.Signals(-code).name
                    talk(
                        f"econmt: error: rank {rank} ({socket.gethostname()}, process {ranks[rank].pid}) was killed "
                        f"by {name}; all ranks leave: the same command goes on from the last saved state"
                    )
            if None in codes.values() and time.monotonic() < self._until:
                return RunResult(state=WorkerState.HEALTHY)
            context.close(signal.SIGKILL)
            if not self._lost:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                number = self._max_restarts - self._remaining_restarts + 1
                talk(
                    f"econmt: all ranks start again from the last saved state ({number} of {self._max_restarts})"
                )
        found: RunResult = super()._monitor_workers(worker_group)
        return found
