"""Tracks the live bytes at every moment of a computation.

A :class:`Tracker` observes every storage that a PyTorch operator creates, resizes or frees, of real and of fake
tensors; views share a storage, which counts once. Operators registered with ``torch.library.custom_op`` run with the
tracker on, so that their workspace is included, or declare it (`econmt_ops.dispatch.traits.Traits.costs`). Memory that
PyTorch's own operators use internally, such as a weight reordered by oneDNN, is included only on a GPU, where the
allocator counts it.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from econmt.memory.measure.flops import flops_formula
from econmt_ops.core import scopes as accounting
from econmt_ops.dispatch.traits import Cost, cost_of

BLOCK = 512
"""Granularity of CUDA's caching allocator, in bytes."""

PHASES = ("forward", "backward", "optimizer")
"""Phases of a training step, in order."""

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class NodeLayers:
    """Finds the layer of an autograd node: the layer whose code created the node in the forward pass.

    Autograd numbers its nodes in order of creation, so it suffices to know at which numbers the current layer changed.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._layers: list[str] = []
        self._parameters: dict[int, str] = {}

    def add_parameters(self, layers: Mapping[Tensor, str]) -> None:
        """Sets the layers of parameters, whose nodes have no numbers."""
        self._parameters.update({id(parameter): layer for parameter, layer in layers.items()})

    def note(self, layer: str) -> None:
        """Assigns the nodes that are created from now on to ``layer``."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._layers.append(layer)

    def __call__(self, node: Any) -> str:
        """Returns the layer of a node."""
        if hasattr(node, "variable"):
            return self._parameters.get(id(node.variable), "other")
        index = bisect_right(self._numbers, node._sequence_nr())
        return self._layers[index - 1] if index else "other"

    def running(self) -> str:
        """Returns the layer of the running code; in a backward pass, that of the node being computed."""
        layer = accounting.current_layer()
        node = torch._C._current_autograd_node() if layer == "other" else None
        return layer if node is None else self(node)


@dataclass(eq=False)
class Storage:
    """Storage of one or several tensors.

    Attributes:
        size: Bytes, rounded up to whole blocks of the allocator.
        shape, dtype: Shape and type of the first tensor that was observed in it.
        operator: Operator that created it; empty if it existed before the recording.
        layer: Layer whose code created it.
        address: Address of its first byte; 0 for fake tensors.
        kept_by: First layer for which autograd keeps it for the backward pass; None if it is not kept.
        category: Category from :meth:`Tracker.label`, such as weights; None without a label.
    """

    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operator: str
    layer: str
    address: int
    kept_by: str | None = None
    category: str | None = None


class Change(NamedTuple):
    """Growth of a storage by ``size`` bytes (shrinkage if negative), ``seconds`` after the start."""

    seconds: float
    storage: Storage
    size: int


class Hidden(NamedTuple):
    """Bytes that an operator used and freed internally."""

    size: int
    layer: str
    operator: str


class Beginning(NamedTuple):
    """Beginning of a phase: ``seconds`` after the start, after a number of ``changes``."""

    seconds: float
    changes: int


class Repetition(NamedTuple):
    """Changes ``begin`` to ``end`` that stand for ``times`` equal sequences, which add up to no growth.

    ``order`` has the indices of the changes of one sequence, with those of inner repetitions as often as they occurred.
    """

    begin: int
    end: int
    times: int
    order: list[int]


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages of one device.

    Args:
        device: Device whose tensors count.
        block: Multiple of bytes to which sizes are rounded up, as an allocator does.
        replacements: Functions to run instead of operators, with the tracker on; one that returns NotImplemented leaves
            its call to the operator.
        meter: Returns the bytes allocated on the device, and their peak since the last call.

    Attributes:
        before: Storages that existed before the recording, with their sizes then.
        changes: Changes of sizes, in order.
        hidden: Memory that operators used internally, by the number of changes before.
        repetitions: Changes that stand for several equal sequences, in order; outermost ones only.
        flops: Floating-point operations of matrix products, by the type of their factors.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        block: int = 1,
        replacements: Mapping[OpOverload, Callable[..., Any]] | None = None,
        meter: Callable[[], tuple[int, int]] | None = None,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = lambda func, args, kwargs: func(
            *args, **kwargs
        ),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self._type = device.type
        self.nodes = NodeLayers()
        self.before: list[tuple[Storage, int]] = []
        self.changes: list[Change] = []
        self.hidden: dict[int, Hidden] = {}
        self.repetitions: list[Repetition] = []
        self.begins: dict[str, Beginning] = {}
        self.seconds = 0.0
        self.flops: Counter[torch.dtype] = Counter()
        self._block = block
        self._replacements = replacements or {}
        self._meter = meter
        self._run = run
        self._at_start = self._grown = 0
        self._known: dict[int, tuple[Storage, weakref.ref[Any]]] = {}
        self._facts: dict[int, _Facts] = {}
        self._inside: list[str] = []
        self._replacing: int | None = None
        self._recording = False
        self._start = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Tracks the operators that run within the context."""
        self._start = time.perf_counter()
        self._recording = True
        if self._meter is not None:
            self._at_start, _ = self._meter()
        self.nodes.note(accounting.current_layer())
        try:
            with (
                accounting.watching(self.nodes.note),
                torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor),
                self,
            ):
                yield
        finally:
            self._recording = False
            self.seconds = time.perf_counter() - self._start

    def begin(self, phase: str) -> None:
        """Begins a phase, one of :data:`PHASES`."""
        self.begins[phase] = Beginning(time.perf_counter() - self._start, len(self.changes))

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
            facts = self._facts[id(func)] = _look_at(func, self._replacements)
        if facts.is_device:
            return args[0].fake_device
        if facts.is_primitive:
            return func(*args, **kwargs)
        if facts.is_composite:  # below autograd, PyTorch does not decompose operators by itself
            # Runs the operator's kernel. func.decompose might run a decomposition for tracing, which splits an LSTM
            # into steps where the kernel calls cuDNN.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        read = self._on_device(args)
        if kwargs:
            read += self._on_device(kwargs.values())
        for tensor in read:
            self._find(tensor)
        if facts.is_view:  # its memory is known already
            return self._run(func, args, kwargs)
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
        self, func: Any, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any], read: list[Tensor]
    ) -> Any:
        """Runs an operator that creates or changes tensors, and records them; ``read``: its tensor arguments."""
        body, cost = facts.body, facts.cost
        if body is None:
            if self._meter is not None:
                self._meter()
            result = self._run(func, args, kwargs)
        else:
            with self:
                result = body(*args, **kwargs)
            if result is NotImplemented:
                result = self._run(func, args, kwargs)
        if facts.flops is not None and read:
            self.flops[read[0].dtype] += int(facts.flops(*args, **kwargs, out_val=result))
        if facts.is_mutable:
            for tensor in read:
                self._update(tensor)
        for tensor in self._on_device((result,)):
            if tensor.untyped_storage()._cdata not in self._known:
                self._add(tensor)
        if cost is not None:
            self._charge(cost(*args, **kwargs), read[0].dtype)
        if body is None and self._meter is not None:
            self._note_hidden(self._meter()[1])
        return result

    def _charge(self, cost: Cost, dtype: torch.dtype) -> None:
        """Records the internal memory and the operations that an operator declares."""
        self.flops[dtype] += cost.flops
        if self._meter is None:  # otherwise the meter has counted it
            self._add(torch.empty(cost.workspace, dtype=torch.uint8, device=self.device))

    def _on_device(self, values: Iterable[Any]) -> list[Tensor]:
        """Returns the dense tensors of the device in nested lists and tuples."""
        tensors: list[Tensor] = []
        for value in values:
            if isinstance(value, Tensor):
                if _device_type(value) == self._type and value.layout == torch.strided:
                    tensors.append(value)
            elif isinstance(value, list | tuple):
                tensors += self._on_device(value)
        return tensors

    def _keep(self, tensor: Tensor) -> Tensor:
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

    def _add(self, tensor: Tensor) -> None:
        storage = self._watch(tensor, self._path(), self.nodes.running())
        self._change(storage, storage.size)

    def _watch(self, tensor: Tensor, operator: str, layer: str) -> Storage:
        memory = tensor.untyped_storage()
        key = memory._cdata
        storage = Storage(
            self._round(memory.nbytes()),
            tuple(tensor.shape),
            tensor.dtype,
            operator,
            layer,
            0 if memory.device.type == "meta" else memory.data_ptr(),
        )

        def gone(_: weakref.ref[Any]) -> None:
            del self._known[key]
            self._change(storage, -storage.size)

        self._known[key] = storage, weakref.ref(memory, gone)
        return storage

    def _update(self, tensor: Tensor) -> None:
        """Records the new size if an operator has resized one of its arguments."""
        memory = tensor.untyped_storage()
        storage = self._known[memory._cdata][0]
        size = self._round(memory.nbytes())
        if size != storage.size:
            self._change(storage, size - storage.size)
            storage.size = size

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
            self.changes.append(Change(time.perf_counter() - self._start, storage, size))

    def _round(self, size: int) -> int:
        return -(-size // self._block) * self._block

    @property
    def unknown(self) -> int:
        """Bytes that were allocated at the start and belong to no known storage."""
        return 0 if self._meter is None else max(0, self._at_start - sum(size for _, size in self.before))

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


def expanded(begin: int, end: int, repetitions: Iterable[Repetition]) -> Iterator[int]:
    """Yields the indices of changes from ``begin`` to ``end``, those of repetitions as often as they occurred."""
    for repetition in repetitions:
        if begin <= repetition.begin and repetition.end <= end:
            yield from range(begin, repetition.begin)
            for _ in range(repetition.times):
                yield from repetition.order
            begin = repetition.end
    yield from range(begin, end)


class _Facts(NamedTuple):
    """Properties of an operator that do not depend on its arguments.

    Attributes:
        is_device: True if it returns the device of a fake tensor.
        is_primitive: True if it creates no tensors.
        is_composite: True if it consists of other operators.
        is_view: True if its results share the memory of its arguments.
        is_mutable: True if it may write to its arguments.
        replaced: True if a replacement runs instead.
        body: Function that runs with the tracker on; None: the operator runs, without the tracker.
        cost: Returns the internal memory and operations that it declares.
        flops: Formula of its floating-point operations, unless it declares them.
    """

    name: str
    is_device: bool
    is_primitive: bool
    is_composite: bool
    is_view: bool
    is_mutable: bool
    replaced: bool
    body: Callable[..., Any] | None
    cost: Callable[..., Cost] | None
    flops: Callable[..., int] | None


def _look_at(func: Any, replacements: Mapping[OpOverload, Callable[..., Any]]) -> _Facts:
    name = str(func._schema.name)
    replacement = replacements.get(func)
    cost = None if func.namespace == "aten" else cost_of(name)
    is_primitive = func.namespace == "prim"
    return _Facts(
        name.replace("::", "."),
        func is torch.ops.prim.device.default,
        is_primitive,
        not is_primitive and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE),
        func.is_view and replacement is None,
        func._schema.is_mutable,
        replacement is not None,
        replacement or (None if cost else _body(func, name)),
        cost,
        None if cost else flops_formula(func),
    )


def _body(func: Any, name: str) -> Callable[..., Any] | None:
    """Returns the Python body of a custom operator."""
    definition = None if func.namespace == "aten" else OPDEFS.get(name)
    return None if definition is None else definition._init_fn


def _device_type(tensor: Tensor) -> str:
    # A fake tensor's ``device`` is a slow operator.
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type
