"""Communicator of several processes on one or more hosts: connecting, collectives, failure detection and shutdown.

The processes are started by torchrun or by ``econmt train --processes N``, which set each one's rank (RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE) and the address of the store (MASTER_ADDR, MASTER_PORT) in the environment. Gradients go
through NCCL on GPUs and gloo on CPUs, decisions through gloo, and waiting for long work of one rank through torch's
store.

A rank that dies or hangs must not leave the others waiting. A rank whose collective fails, by a broken connection or a
timeout, writes that to the store, where a thread of every rank waits for it. These threads answer a roll call, which
shows the rank that does not answer, or that has not reached the collective in which all others wait. One of them
reports it in one line, and all exit.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from econmt.config.recipe import ParallelSection
from econmt.engine.communicator import Communicator, Json
from econmt.errors import EconmtError, printable, talk
from econmt.parallel.groups import Group
from econmt.parallel.orphans import LAUNCHER
from econmt.parallel.rank_environment import RESTARTS, RankEnvironment
from econmt.parallel.reduction import BucketedReduction, travelling
from econmt.parallel.sharding import OptimizerShares

_STOP = "stop"
"""Store key with the reason why the run ends, as JSON; afterwards each rank's own key wakes its thread."""

_SPOKEN = "spoken"
"""Store key that counts the ranks about to report the reason; the first one reports it."""

LOST = 75
"""Exit code of a rank that stops because another was lost, upon which the launcher may restart all."""

_ROLL_CALL = 4.0
"""Seconds in which a live rank answers the roll call."""

_LEAVING = 3.0
"""Seconds that a rank has to exit by itself after another has reported the reason."""

_POLL = 1e-4
"""Seconds between two polls of a GPU."""

_MARGIN = timedelta(seconds=60)
"""Extra time before NCCL's own timeout, so that econmt's shorter error message comes first."""


class _Processes(Communicator):
    """Communicator of several processes; ``watch`` detects lost ranks."""

    def __init__(
        self,
        environment: RankEnvironment,
        settings: ParallelSection,
        watch: _Watch,
        store: Any,
        device: torch.device,
    ) -> None:
        self.rank, self.size, self.local_size = environment.rank, environment.size, environment.local_size
        self._settings, self._watch, self._store = settings, watch, store
        self._timeout = timedelta(seconds=settings.timeout)
        self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        self._group: Any = self._control
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            self._group = dist.new_group(backend="nccl", timeout=self._timeout + _MARGIN, device_id=device)
        self._calls, self._destroyed = 0, False

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        with self.watched(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, source, group=self._group if tensor.is_cuda else self._control)

    def gather(self, value: Json, *, patient: bool = False) -> list[Json]:
        if patient:
            self._patient_barrier()
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self.watched():
            sizes = torch.zeros(self.size, dtype=torch.int64)
            sizes[self.rank] = len(text)
            dist.all_reduce(sizes, group=self._control)
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(text)] = text
            gathered = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(gathered, padded, group=self._control)
        return [
            json.loads(bytes(encoded[:size].tolist()))
            for encoded, size in zip(gathered, sizes.tolist(), strict=True)
        ]

    def on_rank_zero(self, function: Callable[[], Json]) -> Json:
        self._calls += 1
        key = f"first/{self._calls}"
        if self.rank == 0:
            result = function()
            with self.watched():
                self._store.set(key, json.dumps(result))
            return result
        with self.watched():
            self._wait_for(key)
            result_of_rank_zero: Json = json.loads(self._store.get(key))
        return result_of_rank_zero

    def _patient_barrier(self) -> None:
        """Waits until every rank has reached this point; without a time limit."""
        self._calls += 1
        key = f"meet/{self._calls}"
        with self.watched():
            if self._store.add(key, 1) == self.size:
                self._store.set(f"{key}/all", "1")
            self._wait_for(f"{key}/all")

    def _wait_for(self, key: str) -> None:
        while True:
            with suppress(dist.DistStoreError):  # not set yet; the pause lets signals be handled
                self._store.wait([key], timedelta(seconds=1))
                return

    def all_reduce_max_later(self, *values: int) -> Callable[[], list[int]]:
        tensor = torch.tensor(values, dtype=torch.int64)
        with self.watched():
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        assert work is not None

        def result() -> list[int]:
            with self.watched():
                work.wait()
            values: list[int] = tensor.tolist()
            return values

        return result

    def reduction(self, parameters: Iterable[nn.Parameter]) -> BucketedReduction | None:
        if self.stages > 1:
            return None
        return BucketedReduction(parameters, self._members(), travelling(self._settings))

    def wait(self, event: torch.cuda.Event) -> None:
        deadline = time.monotonic() + self._settings.timeout
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                self._watch.lost(f"a GPU has waited {self._settings.timeout} s for other ranks")
            time.sleep(_POLL)

    def shares(self, parameters: Iterable[nn.Parameter]) -> OptimizerShares | None:
        if not self._settings.shard_optimizer:
            return None
        return OptimizerShares(parameters, self.rank, self._members())

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._watch.exchanges += 1
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            self._watch.lost(str(error))

    def note(self, update: int) -> None:
        self._watch.update = update

    def destroy(self) -> None:
        """Destroys the process groups.

        NCCL destroys a communicator only when all ranks do so and no CUDA graph captured with it exists; until then it
        waits without a time limit.
        """
        if self._destroyed:
            return
        self._destroyed = True
        if self._group is not self._control:
            gc.collect()  # destroys unreferenced graphs
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream())
            self.wait(event)
        self._patient_barrier()
        late = functools.partial(self._watch.lost, "not all ranks shut down in time")
        with _limited(self._settings.timeout, late), self.watched():
            dist.destroy_process_group()

    def _members(self) -> Group:
        return Group(self.size, self._group, self.watched)


class _Watch(threading.Thread):
    """Thread that waits for the end of the run, answers the roll call, and ends this process.

    Args:
        store: Connection to the store for the training thread.
        thread_store: Connection to the store for this thread; while it waits, no other thread can use it.
        timeout: Timeout of collectives, in seconds.

    Attributes:
        exchanges: Number of collectives that this rank has reached.
        update: Number of the last update that it has finished.
    """

    def __init__(self, rank: int, size: int, store: Any, thread_store: Any, timeout: int) -> None:
        super().__init__(daemon=True, name="econmt-watch")
        self._rank, self._size, self._timeout = rank, size, timeout
        self._store, self._thread_store = store, thread_store
        self._stopped = threading.Event()
        self._exit_lock = threading.Lock()
        self.exchanges = 0
        self.update = 0
        store.set(f"host/{rank}", f"{socket.gethostname()}, process {os.getpid()}")

    def run(self) -> None:
        """Waits for the end of the run and, if a rank was lost, calls the roll and ends the process."""
        reason: dict[str, Any] | None = None
        while reason is None:
            try:
                self._thread_store.wait([f"wake/{self._rank}"], timedelta(hours=1))
                if self._stopped.is_set():
                    return
                reason = json.loads(self._thread_store.get(_STOP))
            except dist.DistStoreError:
                continue
            except RuntimeError:
                if not self._stopped.is_set():
                    self._leave_without_store()
                return
        if not reason["told"]:
            self._call_roll(reason["why"])
            _exit_lost()
        if not self._stopped.wait(_LEAVING):
            os._exit(1)

    def lost(self, why: str) -> NoReturn:
        """Handles a failed collective: finds the cause with the other ranks, reports it and ends the process."""
        if not self._stopped.is_set():
            try:
                self._end_all(told=False, why=why)
            except RuntimeError:
                self._leave_without_store()
            time.sleep(_ROLL_CALL + 2 * _LEAVING)  # the watching thread ends the process earlier
        _exit_lost()

    def failed(self, line: str) -> bool:
        """Tells the other ranks that this one stops with an error; True if this rank reports it to the user."""
        self._stopped.set()
        with suppress(RuntimeError):
            speaks: bool = self._store.add(_SPOKEN, 1) == 1
            self._end_all(told=True, why=line)
            return speaks
        return True

    def leave(self) -> None:
        """Disconnects from the other ranks, which may go on."""
        self._stopped.set()
        with suppress(RuntimeError):
            self._store.set(f"wake/{self._rank}", "1")
            self.join(_LEAVING)

    def _end_all(self, *, told: bool, why: str) -> None:
        """Makes all ranks stop for the reason ``why``.

        If ``told``, a rank reports it to the user; otherwise the ranks call the roll first.
        """
        if not self._store.check([_STOP]):
            self._store.set(_STOP, json.dumps({"told": told, "why": why}))
        for rank in range(self._size):
            self._store.set(f"wake/{rank}", "1")

    def _call_roll(self, why: str) -> None:
        """Finds out which ranks answer, and how far each has come; the first rank to know tells the user."""
        try:
            self._thread_store.set(f"here/{self._rank}", json.dumps([self.exchanges, self.update]))
            deadline = time.monotonic() + _ROLL_CALL
            connected = [rank for rank in range(self._size) if self._thread_store.check([f"host/{rank}"])]
            while time.monotonic() < deadline and not self._thread_store.check(
                [f"here/{rank}" for rank in connected]
            ):
                if self._thread_store.check([_SPOKEN]):
                    return
                time.sleep(0.1)
            answers = {
                rank: json.loads(self._thread_store.get(f"here/{rank}"))
                for rank in connected
                if self._thread_store.check([f"here/{rank}"])
            }
            line = self._line(answers, why)
            if self._thread_store.add(_SPOKEN, 1) == 1:
                talk(f"econmt: error: {line}")
        except RuntimeError:
            self._leave_without_store()

    def _line(self, answers: dict[int, list[int]], why: str) -> str:
        """Composes the error message from the answers of the ranks."""
        missing = [rank for rank in range(self._size) if rank not in answers]
        update = max(last for _, last in answers.values())
        if missing:
            names = " and ".join(f"rank {rank} ({self._host(rank)})" for rank in missing)
            problem = f"{names} {'does' if len(missing) == 1 else 'do'} not answer, after update {update}"
        else:
            least = min(count for count, _ in answers.values())
            late = [rank for rank, (count, _) in answers.items() if count == least]
            if least < max(count for count, _ in answers.values()):
                names = " and ".join(f"rank {rank} ({self._host(rank)})" for rank in late)
                problem = f"{names} did not reach a collective operation after update {update} within {self._timeout} s"
            else:
                problem = f"a collective operation failed after update {update} ({printable(why)})"
        return f"{problem}; all ranks stop; run the same command to resume from the last saved state"

    def _host(self, rank: int) -> str:
        key = f"host/{rank}"
        return self._thread_store.get(key).decode() if self._thread_store.check([key]) else "never connected"

    def _leave_without_store(self) -> NoReturn:
        """Reports that the store is lost, which also decided who reports; here one rank of each host does."""
        self._exit_lock.acquire()  # never released: the first thread ends the process
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        with socket.socket(socket.AF_UNIX) as lock_name:
            try:
                if sys.platform == "linux":  # an abstract name, which disappears with its process
                    lock_name.bind(f"\0econmt/{address}/{os.environ.get(RESTARTS, '0')}")
                keeper = f"the store of the launcher at {address}"
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    keeper = f"rank 0, which holds the store at {address}"
                talk(
                    f"econmt: error: rank {self._rank} ({socket.gethostname()}) has lost {keeper} after "
                    f"update {self.update}; all ranks stop; run the same command to resume from the last saved state"
                )
                time.sleep(_LEAVING)
            except OSError:  # another rank of this host holds the name, and reports
                pass
        _exit_lost()


def _exit_lost() -> NoReturn:
    os._exit(LOST if LAUNCHER in os.environ else 1)


@contextmanager
def _limited(seconds: float, too_late: Callable[[], object]) -> Iterator[None]:
    """Calls a function, which ends the process, if the body takes longer than ``seconds``."""
    limit = threading.Timer(seconds, too_late)
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()


@contextmanager
def joined(
    environment: RankEnvironment, settings: ParallelSection, device: torch.device
) -> Iterator[Communicator]:
    """Connects all processes that were started together; an error in one of them ends all.

    Raises:
        EconmtError: The processes cannot connect.
        SystemExit: This process had an error that another one reports.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    this = f"rank {environment.rank} ({socket.gethostname()})"
    watch: _Watch | None = None

    def too_late() -> None:
        within = f"within {settings.timeout} s (parallel.timeout)"
        if watch is not None:
            watch.lost(f"not all ranks connected {within}")
        talk(f"econmt: error: {this} could not connect to {address} {within}")
        _exit_lost()

    try:
        with _limited(settings.timeout, too_late):  # torch's own limits apply to single attempts
            timeout = timedelta(seconds=settings.timeout) + _MARGIN
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            prefix = f"econmt/{environment.restarts}"
            # A connection serves one thread at a time, and torch waits on the first one until all ranks have connected.
            keys, watch_keys = (PrefixStore(prefix, store.clone()) for _ in range(2))
            watch = _Watch(rank, size, keys, watch_keys, settings.timeout)
            watch.start()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            communicator = _Processes(environment, settings, watch, keys, device)
    except (RuntimeError, ValueError) as error:
        raise EconmtError(
            f"{this} could not connect to the other {environment.size - 1} ranks at {address} ({printable(error)})"
        ) from error
    try:
        yield communicator
        communicator.destroy()
    except BaseException as error:
        if not watch.failed(str(error)):
            sys.exit(getattr(error, "exit_code", 1))
        raise
    watch.leave()
