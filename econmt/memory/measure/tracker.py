"""Tracks the live bytes at every moment of a computation.

A :class:`Tracker` observes every storage that a PyTorch operator creates, resizes or frees, of real and of fake
tensors; views share a storage, which counts once. Memory that operators use internally, such as a weight reordered by
oneDNN, is included if the tracker has a log of the allocator or a meter. Operators registered with
``torch.library.custom_op`` run with the tracker on, if it follows them, so that their workspace is included, or declare
it (`econmt_ops.dispatch.traits.Traits.costs`).
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from econmt.memory.measure.allocations import AllocationLog, attribute, now
from econmt.memory.measure.operators import COMPOSITE, OperatorFacts, look_at
from econmt.memory.measure.storages import (
    Beginning,
    Change,
    Hidden,
    NodeLayers,
    Repetition,
    Sighting,
    Storage,
    Work,
    expanded,
)
from econmt.memory.measure.user_lines import LARGE, user_line
from econmt_ops.core import scopes as accounting
from econmt_ops.dispatch.traits import Cost

_FACTS: dict[int, OperatorFacts] = {}
"""Properties of operators that run as they are, by id."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages of one device.

    Args:
        device: Device whose tensors count.
        block: Multiple of bytes to which sizes are rounded up, as an allocator does.
        replacements: Functions to run instead of operators, with the tracker on; one that returns NotImplemented leaves
            its call to the operator.
        meter: Returns the bytes allocated on the device, and their peak since the last call.
        log: Record of the allocator of a CPU's memory; with it, the changes are those of the allocator.
        follows: True if custom operators run with the tracker on.
        workspace: Returns a function that gives an operator's internal bytes for its arguments, or None.

    Attributes:
        before: Storages that existed before the recording, with their sizes then.
        changes: Changes of sizes, in order.
        hidden: Memory that operators used internally, by the number of changes before.
        repetitions: Changes that stand for several equal sequences, in order; outermost ones only.
        begins: Beginnings of phases, in order.
        works: Operators that ran, in order.
        flops: Floating-point operations of matrix products, by the type of their factors.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        block: int = 1,
        replacements: Mapping[OpOverload, Callable[..., Any]] | None = None,
        meter: Callable[[], tuple[int, int]] | None = None,
        log: AllocationLog | None = None,
        follows: bool = True,
        workspace: Callable[[Any], Callable[..., int] | None] | None = None,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        if log is None:
            self._counts: Callable[[Tensor], bool] = lambda tensor: _device_type(tensor) == device.type
        else:
            self._counts = lambda tensor: tensor.get_device() == -1  # much faster, on real tensors of a CPU
        self.nodes = NodeLayers()
        self.before: list[tuple[Storage, int]] = []
        self.changes: list[Change] = []
        self.hidden: dict[int, Hidden] = {}
        self.repetitions: list[Repetition] = []
        self.begins: list[Beginning] = []
        self.works: list[Work] = []
        self.seconds = 0.0
        self.flops: Counter[torch.dtype] = Counter()
        self._block = block
        self.replacements = replacements or {}
        self._meter = meter
        self._log = log
        self._follows, self._workspace = follows, workspace
        self._sightings: list[Sighting] = []
        self.run = run or _call
        self._at_start = self._grown = 0
        self._known: dict[int, tuple[Storage, weakref.ref[Any]]] = {}
        # Shared by trackers that run every operator as it is.
        self._facts: dict[int, OperatorFacts] = {} if follows else _FACTS
        self._inside: list[str] = []
        self._replacing: int | None = None
        self._recording = False
        self._start = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Tracks the operators that run within the context."""
        with ExitStack() as stack:
            if self._log is not None:
                stack.enter_context(self._log.recording())
            self._start = time.time_ns()
            self._recording = True
            if self._meter is not None:
                self._at_start, _ = self._meter()
            self.nodes.note(accounting.current_layer())
            try:
                with (
                    accounting.watching(self.nodes.note),
                    torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor),
                    self,
                ):
                    yield
            finally:
                self.seconds = now(self._start)
                self._recording = False

    def settle(self) -> None:
        """Replaces the changes by those of the allocator, if there is a log that has not been read."""
        log = self._log
        if log is None or not log.has_events:
            return
        changes, made = attribute(log.events(self._start), self._sightings, self.works)
        self.before = [(storage, size) for storage, size in self.before if storage not in made]
        # The allocator reports no release of memory that is older than the log.
        earlier = {storage for storage, _ in self.before}
        changes += [change for change in self.changes if change.storage in earlier]
        changes.sort(key=attrgetter("seconds"))
        self.changes = changes
        stamps = [change.seconds for change in changes]
        self.begins = [begin._replace(changes=bisect_left(stamps, begin.seconds)) for begin in self.begins]
        self._sightings.clear()

    def begin(self, phase: str) -> None:
        """Begins a phase, one of :data:`econmt.memory.measure.storages.PHASES`."""
        self.begins.append(Beginning(phase, now(self._start), len(self.changes)))

    def beginning(self, phase: str) -> Beginning:
        """Returns the first beginning of a phase."""
        return next(begin for begin in self.begins if begin.phase == phase)

    @contextmanager
    def repeating(self, times: int) -> Iterator[None]:
        """Marks a loop body that stands for ``times`` further equal ones; see `econmt_ops.core.loops`."""
        begin, flops, repetitions = len(self.changes), self.flops.copy(), len(self.repetitions)
        yield
        for dtype, done in self.flops.items():
            self.flops[dtype] = done + times * (done - flops[dtype])
        end, inside = len(self.changes), self.repetitions[repetitions:]
        order = list(expanded(begin, end, inside))
        self.repetitions[repetitions:] = [Repetition(begin, end, times + 1, order)]

    def label(self, tensor: Tensor, category: str, layer: str) -> None:
        """Labels a tensor's storage, whenever it was created; later labels of a storage are ignored."""
        for dense in self._on_device((tensor,)):
            storage = self._find(dense)
            if storage.category is None:
                storage.category, storage.layer = category, layer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevents PyTorch from wrapping the next method for its compiler, which would import 150 MB of modules."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # By id: operators live as long as the program, and their hashes are slow.
        facts = self._facts.get(id(func))
        if facts is None:
            facts = look_at(func, self.replacements, follows=self._follows)
            if self._workspace is not None:
                facts = facts._replace(workspace=self._workspace(func))
            self._facts[id(func)] = facts
        if facts.is_device:
            return args[0].fake_device
        if facts.is_primitive:
            return func(*args, **kwargs)
        if facts.is_composite:  # below autograd, PyTorch does not decompose operators by itself
            # Runs the operator's kernel. func.decompose might run a decomposition for tracing, which splits an LSTM
            # into steps where the kernel calls cuDNN.
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        if facts.is_view:  # creates no memory
            return self.run(func, args, kwargs)
        read = self._on_device(args)
        if kwargs:
            read += self._on_device(kwargs.values())
        for tensor in read:
            if tensor.untyped_storage()._cdata not in self._known:
                self._find(tensor)
        # The operators that a replacement runs are attributed to the replaced operator.
        self._inside.append(facts.name if self._replacing is None else "")
        if facts.replaced and self._replacing is None:
            self._replacing = len(self._inside)
        try:
            return self._follow(func, facts, args, kwargs, read)
        finally:
            if self._replacing == len(self._inside):
                self._replacing = None
            self._inside.pop()

    def _follow(
        self,
        func: Any,
        facts: OperatorFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: list[Tensor],
    ) -> Any:
        """Runs an operator that creates or changes tensors, and records them; ``read``: its tensor arguments."""
        body, cost = facts.body, facts.cost
        begin, phase = now(self._start) if facts.replaced else 0.0, self.phase()
        if body is None:
            if self._meter is not None:
                self._meter()
            begin = now(self._start)
            result = self.run(func, args, kwargs)
        else:
            with self:
                result = body(*args, **kwargs)
            if result is NotImplemented:
                result = self.run(func, args, kwargs)
        flops = 0
        if facts.flops is not None and read:
            flops = int(facts.flops(*args, **kwargs, out_val=result))
            self.flops[read[0].dtype] += flops
        declared = None if cost is None else cost(*args, **kwargs)
        flops += 0 if declared is None else declared.flops
        layer = self.nodes.running()
        if begin:
            self.works.append(Work(begin, now(self._start), self._path(), layer, phase, flops))
        if facts.is_mutable:
            for tensor in read:
                self._update(tensor)
        for tensor in self._on_device((result,)):
            if tensor.untyped_storage()._cdata not in self._known:
                self._add(tensor, layer)
        if declared is not None:
            self._charge(declared, read[0].dtype, layer)
        if facts.workspace is not None:
            self._charge(Cost(facts.workspace(*args, **kwargs)), torch.uint8, layer)
        if body is None and self._meter is not None:
            self._note_hidden(self._meter()[1])
        return result

    def _charge(self, cost: Cost, dtype: torch.dtype, layer: str) -> None:
        """Records the internal memory and the operations that an operator declares."""
        self.flops[dtype] += cost.flops
        if self._meter is None and self._log is None:  # otherwise the allocator has counted it
            self._add(torch.empty(cost.workspace, dtype=torch.uint8, device=self.device), layer)

    def now(self) -> float:
        """Returns the seconds since the start of the recording."""
        return now(self._start)

    def phase(self) -> str:
        """Returns the current phase."""
        return self.begins[-1].phase if self.begins else "forward"

    def _on_device(self, values: Iterable[Any]) -> list[Tensor]:
        """Returns the dense tensors of the device in nested lists and tuples."""
        tensors: list[Tensor] = []
        for value in values:
            if isinstance(value, Tensor):
                if self._counts(value) and value.layout is torch.strided:
                    tensors.append(value)
            elif isinstance(value, list | tuple):
                tensors += self._on_device(value)
        return tensors

    def keep(self, tensor: Tensor) -> Tensor:
        """Records that autograd keeps a tensor for the backward pass."""
        for dense in self._on_device((tensor,)):
            storage = self._find(dense)
            if storage.kept_by is None:
                storage.kept_by = accounting.current_layer()
        return tensor

    def _find(self, tensor: Tensor) -> Storage:
        """Returns the storage of a tensor; an unknown one existed before the recording."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is not None:
            return known[0]
        storage = self._watch(tensor, "", "other")
        self.before.append((storage, storage.size))
        return storage

    def _add(self, tensor: Tensor, layer: str) -> None:
        storage = self._watch(tensor, self._path(), layer)
        if storage.size >= LARGE:
            storage.line = user_line()
        self._change(storage, storage.size)

    def _watch(self, tensor: Tensor, operator: str, layer: str) -> Storage:
        memory = tensor.untyped_storage()
        key = memory._cdata
        storage = Storage(
            0,
            tuple(tensor.shape),
            tensor.dtype,
            operator,
            layer,
            0 if memory.device.type == "meta" else memory.data_ptr(),
        )

        storage.size = self._allocated(storage, memory.nbytes())

        def gone(_: weakref.ref[Any]) -> None:
            del self._known[key]
            self._freed(storage)
            self._change(storage, -storage.size)

        self._known[key] = storage, weakref.ref(memory, gone)
        self._sight(storage, storage.address)
        return storage

    def _sight(self, storage: Storage, address: int) -> None:
        """Notes for the allocator's log whose memory is at an address."""
        if self._log is not None:
            self._sightings.append(Sighting(now(self._start) if self._recording else -1.0, address, storage))

    def _update(self, tensor: Tensor) -> None:
        """Records the new size if an operator has resized one of its arguments."""
        memory = tensor.untyped_storage()
        storage = self._known[memory._cdata][0]
        size = self._allocated(storage, memory.nbytes())
        if size != storage.size:
            if self._log is None:
                self._change(storage, size - storage.size)
                storage.size = size
            elif memory.data_ptr() != storage.address:  # the log has the new memory
                self._change(storage, -storage.size)
                storage.size, storage.address = 0, memory.data_ptr()
                self._sight(storage, storage.address)

    def _note_hidden(self, peak: int) -> None:
        size = peak - self._at_start - self._grown
        before = self.hidden.get(len(self.changes))
        if size > (0 if before is None else before.size):
            self.hidden[len(self.changes)] = Hidden(size, self.nodes.running(), self._path())

    def _path(self) -> str:
        """Returns the names of the running operator and of the custom operators around it, outermost first."""
        return " ".join(filter(None, self._inside))

    def _change(self, storage: Storage, size: int) -> None:
        if self._recording:
            self._grown += size
            self.changes.append(Change(now(self._start), storage, size))

    def _allocated(self, _storage: Storage, size: int) -> int:
        """Returns the bytes that ``size`` bytes of a storage take."""
        return -(-size // self._block) * self._block

    def _freed(self, storage: Storage) -> None:
        """Notes that a storage is gone."""

    @property
    def unknown(self) -> int:
        """Bytes that were allocated at the start and belong to no known storage."""
        return max(0, self._at_start - sum(size for _, size in self.before)) if self._at_start else 0

    def live(self) -> Iterator[int]:
        """Yields the live bytes at the start and after each change, including memory that operators use internally."""
        total = self.unknown + sum(size for _, size in self.before)
        for moment, grown in enumerate(chain([0], (change.size for change in self.changes))):
            total += grown
            hidden = self.hidden.get(moment)
            yield total if hidden is None else total + hidden.size

    def peak(self) -> tuple[int, int]:
        """Returns the most live bytes, and the number of changes before that moment."""
        moment, size = max(enumerate(self.live()), key=itemgetter(1))  # the first of equals
        return size, moment

    def alive(self, moment: int) -> dict[Storage, int]:
        """Returns the storages that are alive after ``moment`` changes, with their bytes."""
        sizes = dict(self.before)
        for change in self.changes[:moment]:
            sizes[change.storage] = sizes.get(change.storage, 0) + change.size
        return {storage: size for storage, size in sizes.items() if size}

    @property
    def precision(self) -> torch.dtype:
        """Type of most floating-point operations."""
        return max(self.flops, key=self.flops.__getitem__, default=torch.float32)


def _device_type(tensor: Tensor) -> str:
    # A fake tensor's ``device`` is a slow operator.
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
