"""Processes that work together for a benchmark; they are ended when they take too long."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from econmt.errors import EconmtError
from econmt.parallel.orphans import LAUNCHER, end_with_launcher

Work = Callable[[Any], Any]
"""Function of a module that each process runs: it finds its rank in the environment."""


def together(work: Work, job: Any, processes: int, threads: int, limit: float) -> list[Any]:
    """Runs a function in several processes of this host at once, with the environment of torchrun.

    Returns the result of each rank. Raises EconmtError if one failed or they took longer than ``limit`` seconds. No
    process ends before all are done, since ranks that still wait for it would fail.
    """
    # Kept here, so that a rank which is done takes nothing away from the others.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    common = {
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "econmt",
        LAUNCHER: os.getpid(),
    }
    environments = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
    until, results = time.monotonic() + limit, dict[int, Any]()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        told = pool.imap_unordered(partial(_run, work, job, threads), environments)
        while len(results) < processes:
            try:
                rank, result = told.next(max(0.0, until - time.monotonic()))
            except multiprocessing.TimeoutError:
                raise EconmtError(f"not ready within {limit:.0f} s") from None
            if isinstance(result, EconmtError):
                raise EconmtError(f"rank {rank}: {result}")
            results[rank] = result
    return [results[rank] for rank in range(processes)]


def _run(work: Work, job: Any, threads: int, environment: Mapping[str, object]) -> tuple[object, Any]:
    """Runs the work in a process of its own; returns its rank, and the result or a line about its failure."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    end_with_launcher()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name need not lead to where it listens
    torch.set_num_threads(threads)
    try:
        return environment["RANK"], work(job)
    except (EconmtError, RuntimeError, MemoryError) as error:
        return environment["RANK"], EconmtError([*str(error).strip().splitlines(), type(error).__name__][0])
