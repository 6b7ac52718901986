"""Launches the ranks of ``econmt train --processes N`` on this host with PyTorch's elastic agent.

The agent, which torchrun also uses, starts the processes, sets their ranks, watches them and restarts all. This module
adds an error line that names a killed rank, time to save when ranks are told to stop (the agent sends SIGTERM to all as
soon as one has ended, and kills them after 30 s), no restart after an error that would recur, exit codes, and a store
that no other host can reach.
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
"""Arguments of Python that precede those of the command line."""

_POLL = 0.05
"""Seconds between two polls of the processes."""

_GRACE = 8.0
"""Seconds that the other ranks have to stop after one has ended with an error; then they are killed."""

_GRACE_LOST = 2.0
"""Seconds that the other ranks have to stop after one was lost; they only have to report it."""

_CONNECTING = 30
"""Timeout of a connection to the store, in seconds."""


def launch(arguments: Sequence[str], processes: int, max_restarts: int) -> int:
    """Runs ``econmt ARGUMENTS`` in several processes that train together, and restarts all of them if one is lost.

    ``arguments`` begin with the verb. The rank is not among them; it is in the environment.

    Returns:
        0, or the exit code of the process that failed first, or 1 if that was killed by a signal.
    """
    agent_logger = logging.getLogger("torch.distributed.elastic")  # econmt prints one line instead
    agent_logger.addHandler(logging.NullHandler())
    agent_logger.propagate = False
    os.environ[LAUNCHER] = str(os.getpid())
    if sys.platform == "linux":  # the host's own name may resolve to an address that nothing listens on
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # PyTorch's default, not the agent's
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT")  # others would defeat nohup
    words = [word.replace("$", "$$") for word in arguments]  # the agent substitutes ${local_rank}
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
    except SignalException as interruption:  # arrived while the processes were being started
        return 128 + interruption.sigval
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return agent.code


class _Loopback(StaticTCPRendezvous):
    """Rendezvous of a single agent, with a new store for each start that listens on the loopback interface only."""

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server(("127.0.0.1", 0))
        self.master_port = listener.getsockname()[1]
        self._store = TCPStore(
            self.master_addr,
            self.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            use_libuv=False,  # libuv cannot take over a socket in torch 2.7
            master_listen_fd=listener.detach(),
        )
        return super().next_rendezvous()


class _Agent(LocalElasticAgent):
    """Elastic agent of one host; ``code`` is the exit code of the last start."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self.code = 0
        self._max_restarts = spec.max_restarts
        self._signals: list[int] = []
        self._told_to_stop = self._lost = False
        self._deadline = float("inf")

    def _construct_event(self, *_: Any, **__: Any) -> Event:
        """Replaces an unused event for which the agent would look up the host's name, which is slow offline."""
        return Event("econmt", EventSource.AGENT)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.code, self._deadline = 0, float("inf")
        saved = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
        started: dict[int, Any] = super()._start_workers(worker_group)
        for number, handler in saved.items():  # before torch 2.9 the agent replaces all handlers
            signal.signal(number, handler)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)
        return started

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Polls the processes, forwards signals to them, and reports a rank that was killed."""
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        ranks = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        while self._signals:
            self._told_to_stop = True
            number = self._signals.pop(0)
            for process in ranks.values():
                process.send_signal(number)
        codes = {rank: process.poll() for rank, process in ranks.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            if self._deadline == float("inf"):
                rank, code = min(failed.items(), key=lambda item: item[1])  # prefers a killed one
                self._lost = not self._told_to_stop and (code < 0 or code == LOST)
                killed_code = 128 - code if self._told_to_stop else 1  # 128 + number of the signal
                self.code = killed_code if code < 0 else 1 if code == LOST else code
                self._deadline = time.monotonic() + (_GRACE_LOST if self._lost else _GRACE)
                if self._lost and code < 0:
                    self._deadline = 0.0  # the other ranks only wait for it
                    name = signal.Signals(-code).name
                    talk(
                        f"econmt: error: rank {rank} ({socket.gethostname()}, process {ranks[rank].pid}) was killed "
                        f"by {name}; all ranks stop; run the same command to resume from the last saved state"
                    )
            if None in codes.values() and time.monotonic() < self._deadline:
                return RunResult(state=WorkerState.HEALTHY)
            context.close(signal.SIGKILL)
            if not self._lost:
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                number = self._max_restarts - self._remaining_restarts + 1
                talk(
                    f"econmt: restarting all ranks from the last saved state ({number} of {self._max_restarts})"
                )
        result: RunResult = super()._monitor_workers(worker_group)
        return result
