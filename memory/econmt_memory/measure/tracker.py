"""Tracks the live bytes at every moment of a computation.

A :class:`Tracker` observes every storage that a PyTorch operator creates, resizes or frees, of real and of fake
tensors; views share a storage, which counts once. Memory that operators use internally is included if the tracker has a
meter, if an operator of ``torch.library.custom_op`` allocates it with the tracker on, or declares it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from econmt_memory.measure import scopes
from econmt_memory.measure.operators import COMPOSITE, OperatorFacts, look_at
from econmt_memory.measure.storages import (
    REPEATED,
    Change,
    MemoryRecord,
    NodeLayers,
    Storage,
    plain_tensors,
    shape_of,
)
from econmt_memory.measure.user_lines import LARGE, user_line


class Tracker(MemoryRecord, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages of one device.

    Args:
        device: Device whose tensors count.
        block: Multiple of bytes to which sizes are rounded up, as an allocator does.
        replacements: Functions to run instead of operators, with the tracker on; one that returns NotImplemented leaves
            its call to the operator.
        meter: Returns the bytes allocated on the device, and their peak since the last call.
        workspace: Returns a function that gives an operator's internal bytes for its arguments, or None.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        block: int = 1,
        replacements: Mapping[OpOverload, Callable[..., Any]] | None = None,
        meter: Callable[[], tuple[int, int]] | None = None,
        workspace: Callable[[Any], Callable[..., int] | None] | None = None,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        MemoryRecord.__init__(self, device)
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.nodes = NodeLayers()
        self._block = block
        self.replacements = replacements or {}
        self._meter = meter
        self.workspace = workspace
        self.run = run or _call
        self._grown = 0
        self._known: dict[int, tuple[Storage, weakref.ref[Any]]] = {}
        self._facts: dict[int, OperatorFacts] = {}
        self._inside: list[str] = []
        self._replacing: int | None = None
        self._recording = False

    @contextmanager
    def recording(self) -> Iterator[Tracker]:
        """Tracks the operators that run within the context, to which it gives itself."""
        self._start = time.time_ns()
        self._recording = True
        if self._meter is not None:
            self._at_start, _ = self._meter()
        self.nodes.note(scopes.current_layer())
        try:
            with (
                scopes.watching(self.nodes.note),
                torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor),
                self,
            ):
                yield self
        finally:
            self.seconds = self.now()
            self._recording = False

    @contextmanager
    def repeating(self, times: int) -> Iterator[None]:
        """Marks a loop body that stands for ``times`` further equal ones."""
        begin, flops = len(self.changes), self.flops.copy()
        yield
        for dtype, done in self.flops.items():
            self.flops[dtype] = done + times * (done - flops[dtype])
        self.changes += times * [change._replace(storage=REPEATED) for change in self.changes[begin:]]

    def label(self, tensor: Tensor, category: str, layer: str) -> None:
        """Labels a tensor's storage, whenever it was created; later labels of a storage are ignored."""
        for dense in self._on_device(plain_tensors(tensor)):
            storage = self.find(dense)
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
            facts = look_at(func, self.replacements)
            if self.workspace is not None:
                facts = facts._replace(workspace=facts.workspace or self.workspace(func))
            self._facts[id(func)] = facts
        if facts.is_primitive:
            return func(*args, **kwargs)
        if facts.is_composite:  # below autograd, PyTorch does not decompose operators by itself
            # Runs the operator's kernel. func.decompose might run a decomposition for tracing, which splits an LSTM
            # into steps where the kernel calls cuDNN.
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        if facts.is_view:  # creates no memory
            return self.run(func, args, kwargs)
        read = self._on_device((*args, *kwargs.values()))
        for tensor in read:
            if tensor.untyped_storage()._cdata not in self._known:
                self.find(tensor)
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
        self, func: Any, facts: OperatorFacts, args: Any, kwargs: dict[str, Any], read: list[Tensor]
    ) -> Any:
        """Runs an operator that creates or changes tensors, and records them; ``read``: its tensor arguments."""
        body = facts.body
        self.phase()  # which may begin now
        if body is None:
            if self._meter is not None:
                self._meter()
            result = self.run(func, args, kwargs)
        else:
            with self:
                result = body(*args, **kwargs)
            if result is NotImplemented:
                result = self.run(func, args, kwargs)
        if facts.flops is not None and read:
            self.flops[read[0].dtype] += int(facts.flops(*args, **kwargs, out_val=result))
        layer = self.nodes.running()
        if facts.is_mutable:
            for tensor in read:
                self._update(tensor.untyped_storage())
        for tensor in self._on_device((result,)):
            if tensor.untyped_storage()._cdata not in self._known:
                self._add(tensor, layer)
        inside = facts.workspace if self._meter is None else None  # otherwise the allocator counts it
        if inside is not None and (size := inside(*args, **kwargs)):
            self._add(torch.empty(size, dtype=torch.uint8, device=self.device), layer)
        if body is None and self._meter is not None:
            self._note_inside(self._meter()[1], layer)
        return result

    def _on_device(self, values: Iterable[Any]) -> list[Tensor]:
        """Returns the dense tensors of the device in nested lists and tuples."""
        tensors: list[Tensor] = []
        for value in values:
            if isinstance(value, Tensor):
                # A fake tensor's ``device`` is a slow operator.
                device = value.fake_device if isinstance(value, FakeTensor) else value.device
                if device.type == self.device.type and value.layout is torch.strided:
                    tensors.append(value)
            elif isinstance(value, list | tuple):
                tensors += self._on_device(value)
        return tensors

    def keep(self, tensor: Tensor) -> Tensor:
        """Records that autograd keeps a tensor for the backward pass."""
        for dense in self._on_device(plain_tensors(tensor)):
            storage = self.find(dense)
            if storage.kept_by is None:
                storage.kept_by = scopes.current_layer()
        return tensor

    def find(self, tensor: Tensor) -> Storage:
        """Returns the storage of a tensor; an unknown one existed before the recording."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is not None:
            return known[0]
        storage = self._register(tensor, "", "other")
        self.before.append((storage, storage.size))
        return storage

    def _add(self, tensor: Tensor, layer: str) -> None:
        storage = self._register(tensor, self._path(), layer)
        if storage.size >= LARGE:
            storage.line = user_line()
        self._change(storage, storage.size)

    def _register(self, tensor: Tensor, operator: str, layer: str) -> Storage:
        memory = tensor.untyped_storage()
        key = memory._cdata
        storage = Storage(0, shape_of(tensor), tensor.dtype, operator, layer)
        storage.size = self._allocated(storage, memory.nbytes())

        def gone(_: weakref.ref[Any]) -> None:
            del self._known[key]
            self._allocated(storage, 0)
            self._change(storage, -storage.size)

        self._known[key] = storage, weakref.ref(memory, gone)
        return storage

    def _update(self, memory: torch.UntypedStorage) -> None:
        """Records the new size of a storage that has been resized."""
        storage = self._known[memory._cdata][0]
        size = self._allocated(storage, memory.nbytes())
        if size != storage.size:
            self._change(storage, size - storage.size)
            storage.size = size

    def _note_inside(self, peak: int, layer: str) -> None:
        """Records what an operator took and gave back, from the allocator's peak while it ran."""
        size = peak - self._at_start - self._grown
        if size > 0:
            storage = Storage(size, (size,), torch.uint8, self._path(), layer)
            self._change(storage, size)
            self._change(storage, -size)

    def _path(self) -> str:
        """Returns the names of the running operator and of the custom operators around it, outermost first."""
        return " ".join(filter(None, self._inside))

    def _change(self, storage: Storage, size: int) -> None:
        if self._recording:
            self._grown += size
            self.changes.append(Change(self.now(), storage, size))

    def _allocated(self, _storage: Storage, size: int) -> int:
        """Returns the bytes that ``size`` bytes of a storage take, from now on; 0: it is gone."""
        return -(-size // self._block) * self._block


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
