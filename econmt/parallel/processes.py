"""Several processes, on one host or many, as one world: how they meet, agree, notice that one is gone, and leave.

They are started by torchrun or by ``econmt train --processes N``, which tell each in its environment who it is (RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE) and where they meet (MASTER_ADDR, MASTER_PORT). Gradients go through NCCL on
GPUs and gloo on CPUs; what processes agree on goes through gloo, and what takes long on one rank through the store that
torch keeps where they meet.

A rank that dies or stops must not leave the others waiting. Whoever finds that an exchange fails, by a broken
connection or by its timeout, writes that into the store, where a thread of every rank waits for it. These threads
answer a roll call, so that it comes out which rank does not answer, or has not come to the exchange in which all others
wait; one of them tells it in one line, and all leave.
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
from econmt.engine.communicator import Communicator, Event, Json
from econmt.errors import EconmtError, printable, talk
from econmt.parallel.groups import Group
from econmt.parallel.orphans import LAUNCHER
from econmt.parallel.rank_environment import RESTARTS, RankEnvironment
from econmt.parallel.reduction import BucketedReduction, travelling
from econmt.parallel.sharding import OptimizerShares

_STOP = "stop"
"""The key of the store that says why the run ends, as JSON; and then every rank's own key wakes it."""

_SPOKEN = "spoken"
"""The key of the store that counts who has told the reason: the first one does."""

LOST = 75
"""Exit code, for the launcher, of a rank that leaves since another was lost: starting all again may help."""

_ROLL_CALL = 4.0
"""Seconds in which a rank that lives answers."""

_LEAVING = 3.0
"""Seconds that a rank has to leave by itself, once it is told that another has told why."""

_POLL = 1e-4
"""Seconds between looks at a GPU."""

_MARGIN = timedelta(seconds=60)
"""So much later than we NCCL gives up by itself, which takes many lines."""


class Processes(Communicator):
    """The world of several processes; see :func:`joined`.

    Args:
        place: rank of this process.
        settings: section ``parallel`` of the recipe.
        watch: the thread that notices when a rank is gone.
        store: the store of this thread.
        device: device on which this rank computes.
    """

    def __init__(
        self,
        place: RankEnvironment,
        settings: ParallelSection,
        watch: _Watch,
        store: Any,
        device: torch.device,
    ) -> None:
        self.rank, self.size, self.local_size = place.rank, place.size, place.local_size
        self._settings, self._watch, self._store = settings, watch, store
        self._timeout = timedelta(seconds=settings.timeout)
        self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        self._group: Any = self._control
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            self._group = dist.new_group(backend="nccl", timeout=self._timeout + _MARGIN, device_id=device)
        self._calls, self._parted = 0, False

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """See :meth:`econmt.engine.communicator.Communicator.all_reduce`."""
        with self.watched(), torch.no_grad():
            for tensor in tensors:
                dist.all_reduce(tensor, group=self._group_of(tensor))

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """See :meth:`econmt.engine.communicator.Communicator.broadcast`."""
        with self.watched(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, source, group=self._group_of(tensor))

    def gather(self, value: Json, *, patient: bool = False) -> list[Json]:
        """See :meth:`econmt.engine.communicator.Communicator.gather`."""
        if patient:
            self._meet()
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with self.watched():
            sizes = torch.zeros(self.size, dtype=torch.int64)
            sizes[self.rank] = len(text)
            dist.all_reduce(sizes, group=self._control)
            own = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            own[: len(text)] = text
            found = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(found, own, group=self._control)
        return [
            json.loads(bytes(each[:size].tolist())) for each, size in zip(found, sizes.tolist(), strict=True)
        ]

    def on_rank_zero(self, function: Callable[[], Json]) -> Json:
        """See :meth:`econmt.engine.communicator.Communicator.first`."""
        self._calls += 1
        key = f"first/{self._calls}"
        if self.rank == 0:
            result = function()
            with self.watched():
                self._store.set(key, json.dumps(result))
            return result
        with self.watched():
            self._wait_for(key)
            found: Json = json.loads(self._store.get(key))
        return found

    def _meet(self) -> None:
        """Waits until every rank has come here."""
        self._calls += 1
        key = f"meet/{self._calls}"
        with self.watched():
            if self._store.add(key, 1) == self.size:
                self._store.set(f"{key}/all", "1")
            self._wait_for(f"{key}/all")

    def _wait_for(self, key: str) -> None:
        while True:
            with suppress(dist.DistStoreError):  # it has not come yet: signals get their turn
                self._store.wait([key], timedelta(seconds=1))
                return

    def all_reduce_max(self, *values: int) -> list[int]:
        """See :meth:`econmt.engine.communicator.Communicator.largest`."""
        return self.all_reduce_max_later(*values)()

    def all_reduce_max_later(self, *values: int) -> Callable[[], list[int]]:
        """See :meth:`econmt.engine.communicator.Communicator.all_reduce_max_later`."""
        tensor = torch.tensor(values, dtype=torch.int64)
        with self.watched():
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        assert work is not None

        def found() -> list[int]:
            with self.watched():
                work.wait()
            values: list[int] = tensor.tolist()
            return values

        return found

    def reduction(self, parameters: Iterable[nn.Parameter]) -> BucketedReduction:
        """See :meth:`econmt.engine.communicator.Communicator.reduction`."""
        return BucketedReduction(parameters, self._members(), travelling(self._settings))

    def wait(self, event: Event) -> None:
        """See :meth:`econmt.engine.communicator.Communicator.wait`."""
        until = time.monotonic() + self._settings.timeout
        while not event.query():
            if time.monotonic() > until:
                self._watch.lost(f"a GPU has waited {self._settings.timeout} s for the others")
            time.sleep(_POLL)

    def shares(self, parameters: Iterable[nn.Parameter]) -> OptimizerShares | None:
        """See :meth:`econmt.engine.communicator.Communicator.shares`."""
        if not self._settings.shard_optimizer:
            return None
        return OptimizerShares(parameters, self.rank, self._members())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See :meth:`econmt.engine.communicator.Communicator.watched`."""
        self._watch.exchanges += 1
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            self._watch.lost(str(error))

    def note(self, update: int) -> None:
        """See :meth:`econmt.engine.communicator.Communicator.note`."""
        self._watch.update = update

    def destroy(self) -> None:
        """See :meth:`econmt.engine.communicator.Communicator.destroy`.

        NCCL gives up a communicator only when all ranks do, and when no graph is left that was captured with it; until
        then it waits, without a limit of its own.
        """
        if self._parted:
            return
        self._parted = True
        if self._group is not self._control:
            gc.collect()  # graphs that nobody has any more
            event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream())
            self.wait(event)
        self._meet()
        late = functools.partial(self._watch.lost, "ranks did not part in time")
        with _limited(self._settings.timeout, late), self.watched():
            dist.destroy_process_group()

    def _members(self) -> Group:
        return Group(self.size, self._group, self.watched)

    def _group_of(self, tensor: Tensor) -> Any:
        return self._group if tensor.is_cuda else self._control


class _Watch(threading.Thread):
    """Waits until a rank ends the run, answers the roll call, and ends this process.

    Args:
        rank: rank of this process.
        size: number of ranks.
        store: the store, for the thread that trains.
        own: the store by another connection: while this thread waits, nobody else can use its connection.
        timeout: timeout of exchanges, in seconds.

    Attributes:
        exchanges: number of exchanges that this rank has come to.
        update: last update that it has done.
    """

    def __init__(self, rank: int, size: int, store: Any, own: Any, timeout: int) -> None:
        super().__init__(daemon=True, name="econmt-watch")
        self._rank, self._size, self._store, self._own, self._timeout = rank, size, store, own, timeout
        self._left = threading.Event()
        self._leaving = threading.Lock()
        self.exchanges = 0
        self.update = 0
        store.set(f"host/{rank}", f"{socket.gethostname()}, process {os.getpid()}")

    def run(self) -> None:
        """Until the process ends."""
        reason: dict[str, Any] | None = None
        while reason is None:
            try:
                self._own.wait([f"wake/{self._rank}"], timedelta(hours=1))
                if self._left.is_set():
                    return
                reason = json.loads(self._own.get(_STOP))
            except dist.DistStoreError:
                continue
            except RuntimeError:
                if not self._left.is_set():
                    self._leave_without_store()
                return
        if not reason["told"]:
            self._call_roll(reason["why"])
            _exit_lost()
        if not self._left.wait(_LEAVING):
            os._exit(1)

    def lost(self, why: str) -> NoReturn:
        """An exchange has failed: finds out why with the others, tells it and ends the process."""
        if not self._left.is_set():
            try:
                self._end_all(told=False, why=why)
            except RuntimeError:
                self._leave_without_store()
            time.sleep(_ROLL_CALL + 2 * _LEAVING)  # the thread ends the process before
        _exit_lost()

    def failed(self, line: str) -> bool:
        """Tells the others that this rank leaves with an error; True if this rank is to tell the user why."""
        self._left.set()
        with suppress(RuntimeError):
            speaks: bool = self._store.add(_SPOKEN, 1) == 1
            self._end_all(told=True, why=line)
            return speaks
        return True

    def leave(self) -> None:
        """Leaves the others, who may go on."""
        self._left.set()
        with suppress(RuntimeError):
            self._store.set(f"wake/{self._rank}", "1")
            self.join(_LEAVING)

    def _end_all(self, *, told: bool, why: str) -> None:
        """Makes all ranks leave.

        Args:
            told: True if a rank tells the user why; else they call the roll first.
            why: the reason, in words.
        """
        if not self._store.check([_STOP]):
            self._store.set(_STOP, json.dumps({"told": told, "why": why}))
        for rank in range(self._size):
            self._store.set(f"wake/{rank}", "1")

    def _call_roll(self, why: str) -> None:
        """Finds out who answers, and how far each has come; the rank that knows first tells the user."""
        try:
            self._own.set(f"here/{self._rank}", json.dumps([self.exchanges, self.update]))
            until = time.monotonic() + _ROLL_CALL
            came = [rank for rank in range(self._size) if self._own.check([f"host/{rank}"])]
            while time.monotonic() < until and not self._own.check([f"here/{rank}" for rank in came]):
                if self._own.check([_SPOKEN]):
                    return
                time.sleep(0.1)
            here = {
                rank: json.loads(self._own.get(f"here/{rank}"))
                for rank in came
                if self._own.check([f"here/{rank}"])
            }
            line = self._line(here, why)
            if self._own.add(_SPOKEN, 1) == 1:
                talk(f"econmt: error: {line}")
        except RuntimeError:
            self._leave_without_store()

    def _line(self, here: dict[int, list[int]], why: str) -> str:
        """Returns the message about ranks that do not answer, from the answers of the others."""
        gone = [rank for rank in range(self._size) if rank not in here]
        update = max(last for _, last in here.values())
        if gone:
            names = " and ".join(f"rank {rank} ({self._host(rank)})" for rank in gone)
            what = f"{names} {'does' if len(gone) == 1 else 'do'} not answer, after update {update}"
        else:
            least = min(count for count, _ in here.values())
            late = [rank for rank, (count, _) in here.items() if count == least]
            if least < max(count for count, _ in here.values()):
                names = " and ".join(f"rank {rank} ({self._host(rank)})" for rank in late)
                what = f"{names} did not come to an exchange after update {update} within {self._timeout} s"
            else:
                what = f"an exchange between ranks failed after update {update} ({printable(why)})"
        return f"{what}; all ranks leave: the same command goes on from the last saved state"

    def _host(self, rank: int) -> str:
        key = f"host/{rank}"
        return self._own.get(key).decode() if self._own.check([key]) else "it never came"

    def _leave_without_store(self) -> NoReturn:
        """Whoever kept the store is gone, and with it the way to agree on who tells: one rank of each host does."""
        self._leaving.acquire()  # for good: the thread that comes first ends the process
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        with socket.socket(socket.AF_UNIX) as name:
            try:
                if sys.platform == "linux":  # a name without a file, which goes with the process that has it
                    name.bind(f"\0econmt/{address}/{os.environ.get(RESTARTS, '0')}")
                keeper = f"what the launcher keeps at {address}"
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                    keeper = f"rank 0, which keeps {address}"
                talk(
                    f"econmt: error: rank {self._rank} ({socket.gethostname()}) has lost {keeper}, where ranks meet, "
                    f"after update {self.update}; all ranks leave: the same command goes on from the last saved state"
                )
                time.sleep(_LEAVING)
            except OSError:  # another one has the name, and tells
                pass
        _exit_lost()


def _exit_lost() -> NoReturn:
    os._exit(LOST if LAUNCHER in os.environ else 1)


@contextmanager
def _limited(seconds: float, too_late: Callable[[], object]) -> Iterator[None]:
    """Calls a function, which ends the process, if the body takes longer."""
    limit = threading.Timer(seconds, too_late)
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()


@contextmanager
def joined(place: RankEnvironment, settings: ParallelSection, device: torch.device) -> Iterator[Processes]:
    """The world of all processes that were started together, within which an error on one ends all.

    Args:
        place: who this process is.
        settings: of the recipe.
        device: on which it computes.

    Raises:
        EconmtError: the processes do not find each other.
        SystemExit: this process had an error that another one tells of.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    this = f"rank {place.rank} ({socket.gethostname()})"
    watch: _Watch | None = None

    def too_late() -> None:
        within = f"within {settings.timeout} s (parallel.timeout)"
        if watch is not None:
            watch.lost(f"not all ranks came {within}")
        talk(f"econmt: error: {this} did not reach {where} {within}")
        _exit_lost()

    try:
        with _limited(settings.timeout, too_late):  # torch's own limits are of each try of each connection
            timeout = timedelta(seconds=settings.timeout) + _MARGIN
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            prefix = f"econmt/{place.restarts}"
            # A connection serves one thread at a time, and torch waits on the first until all have come.
            keys, own = (PrefixStore(prefix, store.clone()) for _ in range(2))
            watch = _Watch(rank, size, keys, own, settings.timeout)
            watch.start()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            communicator = Processes(place, settings, watch, keys, device)
    except (RuntimeError, ValueError) as error:
        raise EconmtError(
            f"{this} did not find the other {place.size - 1} ranks at {where} ({printable(error)})"
        ) from error
    try:
        yield communicator
        communicator.destroy()
    except BaseException as error:
        if not watch.failed(str(error)):
            sys.exit(getattr(error, "exit_code", 1))
        raise
    watch.leave()
