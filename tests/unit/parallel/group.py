"""Processes that stay for a whole session of tests and train together in worlds of one to four ranks.

They are forks of one that has imported everything, since each import of torch takes two seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from econmt.config.recipe import ParallelSection
from econmt.parallel.processes import joined
from econmt.parallel.rank_environment import RankEnvironment
from tests.conftest import SOURCES

Job = Callable[..., Any]
"""Called on each rank with its world first; what it returns goes to the test."""


class Group:
    """Processes that wait for jobs; each is started for the first job that needs so many."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []

    def _start(self, ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.unit.parallel.jobs"])
        with pytest.MonkeyPatch.context() as patch:  # which is where the server looks for what it imports
            patch.setenv("PYTHONPATH", SOURCES)
            forkserver.ensure_running()
        for _ in range(len(self._workers), ranks):
            here, there = context.Pipe()
            self._pipes.append(here)
            self._workers.append(context.Process(target=_work, args=(there,), daemon=True))
            self._workers[-1].start()

    def run(self, ranks: int, job: Job, *arguments: Any, **settings: Any) -> list[Any]:
        """What a job returns on each of so many ranks, which meet anew for it.

        Args:
            ranks: how many.
            job: of a module that the processes can import.
            arguments: of the job, after the world.
            settings: of the recipe's section ``parallel``.
        """
        self._start(ranks)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(ranks):
            self._pipes[rank].send((rank, ranks, store.port, job, arguments, settings))
        found = []
        for rank in range(ranks):
            try:
                found.append(self._pipes[rank].recv())
            except EOFError:
                found.append((False, "its process has ended"))
        if not all(good for good, _ in found):
            self.close()
            wrong = (f"rank {rank}: {value}\n" for rank, (good, value) in enumerate(found) if not good)
            pytest.fail("".join(wrong))
        return [value for _, value in found]

    def close(self) -> None:
        """Ends the processes."""
        for pipe, worker in zip(self._pipes, self._workers, strict=True):
            with suppress(BrokenPipeError):
                pipe.send(None)
            worker.join(10)
            worker.kill()
        self._pipes, self._workers = [], []


def _work(pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        rank, ranks, port, job, arguments, settings = order
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        place = RankEnvironment(rank, ranks, rank, ranks, 0)
        try:
            with joined(place, ParallelSection(**settings), torch.device("cpu")) as communicator:
                result = job(communicator, *arguments)
            pipe.send((True, result))
        except BaseException:  # noqa: BLE001  the test is told
            pipe.send((False, traceback.format_exc()))
