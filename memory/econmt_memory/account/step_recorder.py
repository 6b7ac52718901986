"""Recorder of a program's step, which leaves the work to PyTorch's profiler and adds what only Python knows."""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from econmt_memory.estimate.allocator import cublas_workspaces
from econmt_memory.measure import scopes
from econmt_memory.measure.allocations import OUTSIDE, recorded
from econmt_memory.measure.ops_package import whole_operators
from econmt_memory.measure.profiled_operators import (
    AttributedAllocation,
    NodeRun,
    ProfiledOperator,
    extent_of,
    read_events,
    tensors_of,
)
from econmt_memory.measure.storages import (
    BLOCK,
    Beginning,
    Change,
    MemoryRecord,
    NodeLayers,
    Storage,
    plain_tensors,
    shape_of,
)
from econmt_memory.measure.user_lines import LARGE, user_line


class StepRecorder(MemoryRecord):
    """Records a program's step from the profiler's events, and from hooks of modules and of what autograd keeps.

    The profiler notes each operator and each allocation without running Python. Hooks note times and addresses alone;
    all else is computed from them when the step has ended.

    Args:
        device: Device whose memory counts.

    Attributes:
        nodes: Layers of autograd's nodes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.nodes = NodeLayers()
        self._nodes_of_backward = NodeLayers()
        self._recorded: list[Any] = []
        self._thread = threading.get_ident()
        self._index = -1 if device.type == "cpu" else device.index  # as Tensor.get_device() tells
        self._end = 0
        self._scopes: list[tuple[int, str]] = []
        self._updates: list[int] = []
        # Arguments for the methods of _StepMemory with these names; the first is the time, in nanoseconds of the epoch.
        self._notes: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self._used: set[int] = set()
        self._references: list[weakref.ref[Any]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the operators that run within the context."""
        if self.device.type == "cuda":
            self._at_start = torch.cuda.memory_allocated(self.device)
            self._note_workspaces(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
        with recorded() as self._recorded:
            self._start = time.time_ns()
            self.enter(scopes.current_layer())
            try:
                with (
                    scopes.watching(self.enter),
                    whole_operators(),
                    torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor),
                ):
                    yield
            finally:
                torch._C._autograd._enable_record_function(True)
                self._end = time.time_ns()
                self.seconds = self.since(self._end)

    def enter(self, layer: str) -> None:
        """Notes that the program's code belongs to ``layer`` from now on."""
        self._scopes.append((time.time_ns(), layer))
        nodes = self.nodes if threading.get_ident() == self._thread else self._nodes_of_backward
        nodes.note(layer)

    def update(self, *, elementwise: bool = False) -> None:
        """Notes that an optimizer's step begins or ends.

        Args:
            elementwise: True if one begins that computes no products of matrices. Its operators, which take lists of
                all parameters, are not recorded one by one.
        """
        torch._C._autograd._enable_record_function(not elementwise)
        self._updates.append(time.time_ns())

    def label(self, tensor: Tensor, category: str, layer: str) -> None:
        """Labels a tensor's storage, whenever it was created; later labels of a storage are ignored."""
        for plain in plain_tensors(tensor):
            address = self._note_use(plain)
            if address:
                self._notes["label"].append((time.time_ns(), address, category, layer))

    def made(self, tensor: Any) -> None:
        """Notes that the running line of the program has made a tensor."""
        if isinstance(tensor, Tensor) and (address := _address(tensor)) and tensor.nbytes >= LARGE:
            self._notes["mark"].append((time.time_ns(), address, None, user_line()))

    def use(self, tensor: Tensor) -> None:
        """Notes the storage of a tensor that may be older than the recording."""
        # The profiler does not tell how large a storage is that it has not seen allocated, and a CPU's allocator not
        # when it is released.
        for plain in plain_tensors(tensor):
            if self._index < 0 and not plain.requires_grad:
                self._note_use(plain)

    def keep(self, tensor: Tensor) -> Tensor:
        """Notes that autograd keeps a tensor for the backward pass."""
        inner = next(plain_tensors(tensor))
        address = _address(inner)
        if address:
            line = user_line() if inner.nbytes >= LARGE else ""
            self._notes["mark"].append((time.time_ns(), address, scopes.current_layer(), line))
            self.use(inner)
        return tensor

    def _note_use(self, tensor: Tensor) -> int:
        """Notes the storage of a tensor, and returns its address; 0 if it is elsewhere."""
        address = _address(tensor) if tensor.get_device() == self._index else 0
        if not address or address in self._used:
            return address
        self._used.add(address)
        memory = tensor.untyped_storage()
        self._notes["use"].append((time.time_ns(), address, memory.nbytes(), shape_of(tensor), tensor.dtype))
        if self._index < 0:
            released = self._notes["release_older"]

            def gone(_: weakref.ref[Any]) -> None:
                released.append((time.time_ns(), address))

            self._references.append(weakref.ref(memory, gone))
        return address

    def _note_workspaces(self, segments: Sequence[dict[str, Any]]) -> None:
        """Notes the blocks of a GPU's allocator that are as large as a workspace of cuBLAS, which no tensor shows."""
        own = (segment["blocks"] for segment in segments if segment["device"] == self._index)
        for block in chain.from_iterable(own):
            if block["state"] == "active_allocated" and block["size"] in cublas_workspaces():
                self._notes["use"].append((0, block["address"], block["size"], (block["size"],), torch.uint8))

    def settle(self) -> None:
        """Completes the record from the profiler's events, after the recording."""
        if not self._recorded:
            return
        result = self._recorded.pop()
        self._references.clear()
        operators, allocations = read_events(result, self.device)
        self._follow_memory(operators, allocations)
        self._follow_phases(operators)

    def _follow_memory(
        self, operators: Sequence[ProfiledOperator], allocations: Sequence[AttributedAllocation]
    ) -> None:
        if self.device.type == "cuda" and allocations:
            self._at_start = allocations[0].total - allocations[0].size
        memory = _StepMemory(self)
        steps: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = [
            *((each.nanoseconds, memory.change, each) for each in allocations),
            *((each[0], getattr(memory, name), each) for name in self._notes for each in self._notes[name]),
        ]
        for operator in operators:
            tensors = (each for each in tensors_of(operator.inputs) if each.device == self.device)
            steps += [(operator.begin, memory.read, (tensor,)) for tensor in tensors]
        for moment, action, arguments in sorted(steps, key=itemgetter(0)):
            if moment <= self._end:
                action(*arguments)
        memory.name_workspaces()
        self.before = list(memory.older.items())
        self.changes = memory.changes

    def _follow_phases(self, operators: Sequence[ProfiledOperator]) -> None:
        self.begins = [Beginning("forward", 0.0, 0)]
        stamps = [change.seconds for change in self.changes]
        updates = zip(self._updates[::2], repeat(None))  # operators of some are not recorded
        for moment, operator in sorted(
            [*((each.begin, each) for each in operators), *updates], key=itemgetter(0)
        ):
            phase = "optimizer"
            if operator is not None:
                layer, updating = self.layer(*operator[:2]), bisect_right(self._updates, moment) % 2 > 0
                phase = self.phase_of(layer, updating=updating, in_backward=operator.node is not None)
            if phase != self.phase():
                begin = self.since(moment)
                self.begins.append(Beginning(phase, begin, bisect_left(stamps, begin)))

    def layer(self, nanoseconds: int, node: NodeRun | None) -> str:
        """Returns the layer of code that ran at a moment, in the backward pass within a node of autograd."""
        index = bisect_right(self._scopes, nanoseconds, key=itemgetter(0)) - 1
        layer = self._scopes[index][1] if index >= 0 else "other"
        if layer != "other" or node is None:
            return layer
        recomputed = node.is_nested and self._nodes_of_backward.are_known
        return (self._nodes_of_backward if recomputed else self.nodes).of_number(node.sequence)


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 if it has no memory of its own, as a sparse or a fake one."""
    kind = type(tensor)
    if tensor.layout is not torch.strided or (kind not in _PLAIN and issubclass(kind, _WITHOUT_MEMORY)):
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # as within torch.vmap
        return 0


_PLAIN = {Tensor, nn.Parameter}
_WITHOUT_MEMORY = (FakeTensor, FunctionalTensor)


class _StepMemory:
    """Storages at their addresses, from one event to the next.

    Attributes:
        older: Storages that existed before the recording and that the step uses, with their bytes.
        changes: Changes of sizes.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self.older: dict[Storage, int] = {}
        self.changes: list[Change] = []
        self._recorder = recorder
        self._on_gpu = recorder.device.type == "cuda"
        self._at: dict[int, Storage] = {}
        self._live = recorder._at_start
        self._elsewhere = Storage(0, (), torch.uint8, OUTSIDE, "other")

    def change(
        self, nanoseconds: int, address: int, size: int, total: int, operator: str, node: NodeRun | None
    ) -> None:
        """Follows an allocation or a release, after which a GPU's allocator has given out ``total`` bytes."""
        if self._on_gpu and total - size != self._live:
            self._catch_up(nanoseconds, total - size - self._live)
        there = self._at.get(address)
        if size > 0:
            if there is not None:
                self.release(nanoseconds, there)
            layer = self._recorder.layer(nanoseconds, node)
            storage = self._at[address] = Storage(size, (size,), torch.uint8, operator, layer, address)
            self._grow(nanoseconds, storage, size)
        elif there is not None:
            if self._on_gpu and there in self.older:  # the allocator knows better than the shapes of tensors
                there.size = self.older[there] = -size
            self.release(nanoseconds, there)
        elif self._on_gpu and self._elsewhere.size + size >= 0:
            self._grow_elsewhere(nanoseconds, size)
        elif self._on_gpu:
            self.use(nanoseconds, address, -size, (-size,), torch.uint8)
            self.release(nanoseconds, self._at[address])

    def _catch_up(self, nanoseconds: int, size: int) -> None:
        """Follows what threads did that the profiler does not follow, such as a collection of garbage."""
        made = (each for each in reversed(self._at.values()) if each.operator and each.size == -size)
        storage = next(made, None)
        if storage is not None:
            self.release(nanoseconds, storage)
        else:
            self._grow_elsewhere(nanoseconds, size)

    def _grow_elsewhere(self, nanoseconds: int, size: int) -> None:
        self._elsewhere.size += size
        self._grow(nanoseconds, self._elsewhere, size)

    def _grow(self, nanoseconds: int, storage: Storage, size: int) -> None:
        self._live += size
        self.changes.append(Change(self._recorder.since(nanoseconds), storage, size))

    def release(self, nanoseconds: int, storage: Storage) -> None:
        """Follows the release of a storage."""
        del self._at[storage.address]
        self._grow(nanoseconds, storage, -storage.size)

    def release_older(self, nanoseconds: int, address: int) -> None:
        """Follows the release of a storage that existed before the recording, unless another one is there now."""
        storage = self._at.get(address)
        if storage in self.older:
            self.release(nanoseconds, storage)

    def use(
        self, _nanoseconds: int, address: int, size: int, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Follows the use of a storage of ``size`` bytes; one at an unknown address existed before."""
        storage = self._at.get(address)
        size = -(-size // BLOCK) * BLOCK if self._on_gpu else size
        if storage is None:
            if not size:
                return
            storage = self._at[address] = Storage(size, tuple(shape), dtype, "", "other", address)
            self.older[storage] = size
        elif storage in self.older:
            storage.size = self.older[storage] = max(storage.size, size)
        if storage.shape == (storage.size,):
            storage.shape, storage.dtype = tuple(shape), dtype

    def read(self, tensor: Any) -> None:
        """Follows an operator's use of a tensor."""
        if not self._on_gpu or tensor.storage_data_ptr in self._at:
            self.use(0, tensor.storage_data_ptr, extent_of(tensor), tensor.sizes, tensor.dtype)

    def name_workspaces(self) -> None:
        """Labels what is alive at the end, has the size of a workspace of cuBLAS, and was never part of a tensor."""
        for storage in self._at.values() if self._on_gpu else ():
            is_raw = storage.shape == (storage.size,) and storage.category is storage.kept_by is None
            if storage.size in cublas_workspaces() and is_raw:
                storage.category, storage.layer, storage.operator = "workspace", "cuBLAS", "cuBLAS"

    def label(self, _nanoseconds: int, address: int, category: str, layer: str) -> None:
        """Sets the category and layer of a storage."""
        storage = self._at.get(address)
        if storage is not None and storage.category is None:
            storage.category, storage.layer = category, layer

    def mark(self, _nanoseconds: int, address: int, kept_by: str | None, line: str) -> None:
        """Sets the line that made a storage, and the layer that keeps it."""
        storage = self._at.get(address)
        if storage is not None:
            storage.kept_by = storage.kept_by or kept_by
            storage.line = storage.line or ("" if storage in self.older else line)
