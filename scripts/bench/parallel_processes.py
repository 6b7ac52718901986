"""Processes that work together for a benchmark; they are ended when they take too long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

from econmt.errors import EconmtError
from econmt.parallel.orphans import LAUNCHER, end_with_launcher

Work = Callable[[Any], Any]
"""Function of a module that each process runs: it finds its rank in the environment."""

_GRACE = 10.0
"""Seconds in which other ranks may tell why one left."""


def together(work: Work, job: Any, processes: int, threads: int, limit: float) -> list[Any]:
    """Runs a function in several processes of this host at once, with the environment of torchrun.

    Returns the result of each rank. Raises EconmtError if one failed or they took longer than ``limit`` seconds; all
    have ended then.
    """
    context = get_context("spawn")
    # Kept here, so that a rank which is done takes nothing away from the others.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "econmt",
        LAUNCHER: os.getpid(),
    }
    running: list[SpawnProcess] = []
    heard: list[Connection] = []
    try:
        for rank in range(processes):
            hears, tells = context.Pipe(duplex=False)
            ranks = {"RANK": rank, "LOCAL_RANK": rank}
            sizes = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            arguments = work, job, {**ranks, **sizes, **address}, threads, tells
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            tells.close()
            running.append(process)
            heard.append(hears)
        return _results(heard, limit)
    finally:
        for process in running:
            process.kill()
            process.join()
        for connection in heard:
            connection.close()


def _results(heard: Sequence[Connection], limit: float) -> list[Any]:
    until, results, gone = time.monotonic() + limit, dict[int, Any](), set[int]()
    while len(results) < len(heard):
        done = results.keys() | gone
        silent = {connection: rank for rank, connection in enumerate(heard) if rank not in done}
        ready = wait(list(silent), max(0.0, until - time.monotonic())) if silent else []
        if not ready:
            if gone:
                raise EconmtError(f"rank {min(gone)} ended without a word")
            raise EconmtError(f"not ready within {limit:.0f} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = silent[connection]
            try:
                told = connection.recv()
            except EOFError:
                # Why it left may be what another rank tells.
                gone.add(rank)
                until = min(until, time.monotonic() + _GRACE)
                continue
            if isinstance(told, EconmtError):
                raise EconmtError(f"rank {rank}: {told}")
            results[rank] = told
    return [results[rank] for rank in range(len(heard))]


def _run(work: Work, job: Any, environment: Mapping[str, object], threads: int, tells: Connection) -> None:
    """Runs the work in a new process, and sends the result or a line about its failure."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    end_with_launcher()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name need not lead to where it listens
    torch.set_num_threads(threads)
    try:
        told = work(job)
    except (EconmtError, RuntimeError, MemoryError) as error:
        told = EconmtError([*str(error).strip().splitlines(), type(error).__name__][0])
    tells.send(told)
    tells.close()
    os._exit(0)  # threads of libraries that wait for other ranks would be torn down while they wait
