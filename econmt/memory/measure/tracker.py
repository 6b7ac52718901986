"""Tracks the live bytes at every moment of a computation.

A :class:`Tracker` follows every storage that an operator of PyTorch makes, resizes or lets go, on real tensors and on
fake ones alike: views share a storage and count once. The body of an operator registered with
``torch.library.custom_op`` is run with the tracker on, so that the workspace inside is seen; what it takes inside may
be declared instead (`econmt_ops.dispatch.traits.Traits.costs`). What the operators of
PyTorch themselves use and give back inside (a reordered weight in oneDNN, say) is seen only where an allocator
counts: on a GPU.
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

from econmt.memory.measure.flops import count_flops, has_flops
from econmt_ops.core import scopes as accounting
from econmt_ops.dispatch.traits import Cost, cost_of

BLOCK = 512
"""Sizes in CUDA's caching allocator are multiples of this, in bytes."""

PHASES = ("forward", "backward", "optimizer")

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class NodeLayers:
    """The layer of every node of the autograd graph: that of the code that made the node in the forward pass.

    Nodes are numbered as they are made, so the numbers at which the current layer changed are enough.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._layers: list[str] = []
        self._parameters: dict[int, str] = {}

    def add_parameters(self, layers: Mapping[Tensor, str]) -> None:
        """Give the layers of parameters, whose nodes have no number of their own."""
        self._parameters.update({id(parameter): layer for parameter, layer in layers.items()})

    def note(self, layer: str) -> None:
        """From now on nodes belong to ``layer``."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._layers.append(layer)

    def __call__(self, node: Any) -> str:
        """The layer of a node."""
        if hasattr(node, "variable"):
            return self._parameters.get(id(node.variable), "other")
        index = bisect_right(self._numbers, node._sequence_nr())
        return self._layers[index - 1] if index else "other"

    def running(self) -> str:
        """The layer of the running code: in a backward pass that of the node that is being computed."""
        layer = accounting.current_layer()
        node = torch._C._current_autograd_node() if layer == "other" else None
        return layer if node is None else self(node)


@dataclass(eq=False)
class Storage:
    """One storage.

    Attributes:
        size: bytes, in whole blocks of the allocator.
        shape, dtype: of the tensor with which it was first seen.
        operator: what made it, "" if it was there before.
        layer: whose code made it.
        kept_by: the layer that first kept it for the backward pass; None: it is not kept.
        category: if known from outside, as of parameters; None otherwise.
        address: of its first byte; 0 for fake tensors.
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
    """A storage has grown by ``size`` bytes (or shrunk, if negative), ``seconds`` after the start."""

    seconds: float
    storage: Storage
    size: int


class Hidden(NamedTuple):
    """Bytes that an operator used and gave back inside."""

    size: int
    layer: str
    operator: str


class Beginning(NamedTuple):
    """When a phase begins: ``seconds`` after the start, after so many changes."""

    seconds: float
    changes: int


class Repetition(NamedTuple):
    """Changes ``begin`` to ``end``, net of nothing, that came several ``times``, all but once left out.

    ``order`` has the numbers of the changes of one time, those of repetitions inside it as often as they came.
    """

    begin: int
    end: int
    times: int
    order: list[int]


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of one device.

    Args:
        device: tensors elsewhere do not count.
        block: sizes are rounded up to multiples of this, as an allocator does.
        replacements: what to run instead of an operator, called with its arguments, the tracker on; NotImplemented
            leaves it to the operator.
        run: runs an operator of PyTorch.
        meter: gives the bytes that the device's allocator has given out, and their peak since the last call.

    Attributes:
        before: storages that were there before, with their sizes then.
        changes: what happened since, in order.
        hidden: by the number of changes before it, what an operator used inside.
        repetitions: changes that stand for others like them, in order; none inside of another.
        begins: when every phase that has begun did so, in their order.
        seconds: how long the recording was.
        flops: floating point operations of the matrix products, by the type of their factors.
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

    # ------------------------------------------------------------------ recording

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow what happens inside."""
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
        """Marks a loop body that represents ``times`` more equal ones; see `econmt_ops.core.loops`."""
        begin, flops, repetitions = len(self.changes), self.flops.copy(), len(self.repetitions)
        yield
        for dtype, done in self.flops.items():
            self.flops[dtype] = done + times * (done - flops[dtype])
        end, inside = len(self.changes), self.repetitions[repetitions:]
        order = list(_in_full(begin, end, inside))
        self.repetitions[repetitions:] = [Repetition(begin, end, times + 1, order)]

    def label(self, tensor: Tensor, category: str, layer: str) -> None:
        """Say what a tensor's storage is for, whenever it was made; the first label of a storage counts."""
        for own in self._own((tensor,)):
            storage = self._find(own)
            if storage.category is None:
                storage.category, storage.layer = category, layer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells PyTorch not to wrap the next method to keep its compiler off it, for which it would import 150 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # By number: operators live as long as the program, and their own hashes are slow.
        facts = self._facts.get(id(func))
        if facts is None:
            facts = self._facts[id(func)] = _look_at(func, self._replacements)
        if facts.is_device:  # a fake tensor is asked for its device
            return args[0].fake_device
        if facts.is_primitive:
            return func(*args, **kwargs)
        if facts.is_composite:  # below autograd PyTorch does not take them apart by itself
            # Its own kernel, as without the tracker: func.decompose might run what is there for tracing, which takes
            # an LSTM apart into steps where the kernel calls cuDNN.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        read = self._own(args)
        if kwargs:
            read += self._own(kwargs.values())
        for tensor in read:
            self._find(tensor)
        if facts.is_view:  # of memory that is known by now
            return self._run(func, args, kwargs)
        # What a replacement does inside stands for the operator alone.
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
        """Run an operator that makes or changes tensors, and account for them; ``read`` are those it is given."""
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
        if facts.counts and read:
            self.flops[read[0].dtype] += count_flops(func, args, kwargs, result)
        if facts.is_mutable:
            for tensor in read:
                self._update(tensor)
        for tensor in self._own((result,)):
            if tensor.untyped_storage()._cdata not in self._known:
                self._add(tensor)
        if cost is not None:
            self._charge(cost(*args, **kwargs), read[0].dtype)
        if body is None and self._meter is not None:
            self._note_hidden(self._meter()[1])
        return result

    def _charge(self, cost: Cost, dtype: torch.dtype) -> None:
        """Account for what an operator declares to take inside, after its results have been made."""
        self.flops[dtype] += cost.flops
        if self._meter is None:  # else it is seen
            self._add(torch.empty(cost.workspace, dtype=torch.uint8, device=self.device))

    def _own(self, values: Iterable[Any]) -> list[Tensor]:
        """The dense tensors of the device in nested lists and tuples."""
        found: list[Tensor] = []
        for value in values:
            if isinstance(value, Tensor):
                if _device_type(value) == self._type and value.layout == torch.strided:
                    found.append(value)
            elif isinstance(value, list | tuple):
                found += self._own(value)
        return found

    def _keep(self, tensor: Tensor) -> Tensor:
        """Called with every tensor that autograd keeps for the backward pass."""
        for own in self._own((tensor,)):
            storage = self._find(own)
            if storage.kept_by is None:
                storage.kept_by = accounting.current_layer()
        return tensor

    def _find(self, tensor: Tensor) -> Storage:
        """The storage of a tensor; one that no operator has made since the start was there before it."""
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
        """Notice that an operator has resized one of its arguments."""
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
        """The running operator, after the custom operators around it."""
        return " ".join(filter(None, self._inside))

    def _change(self, storage: Storage, size: int) -> None:
        if self._recording:
            self._grown += size
            self.changes.append(Change(time.perf_counter() - self._start, storage, size))

    def _round(self, size: int) -> int:
        return -(-size // self._block) * self._block

    # ------------------------------------------------------------------ reading

    @property
    def unknown(self) -> int:
        """Bytes that the allocator had given out at the start and that belong to no known storage."""
        return 0 if self._meter is None else max(0, self._at_start - sum(size for _, size in self.before))

    def live(self) -> Iterator[int]:
        """Live bytes at the start and after each change, with what the operator of that change used inside."""
        total = self.unknown + sum(size for _, size in self.before)
        for moment, grown in enumerate(chain([0], (change.size for change in self.changes))):
            total += grown
            hidden = self.hidden.get(moment)
            yield total if hidden is None else total + hidden.size

    def peak(self) -> tuple[int, int]:
        """The most bytes alive, and the number of changes before that moment."""
        moment, size = max(enumerate(self.live()), key=itemgetter(1))  # the first of equals
        return size, moment

    def numbers(self, begin: int, end: int) -> Iterator[int]:
        """The numbers of the changes from ``begin`` to ``end``, those that stand for others as often as these came."""
        return _in_full(begin, end, self.repetitions)

    def alive(self, moment: int) -> dict[Storage, int]:
        """The storages alive after the first ``moment`` changes, with their bytes then."""
        sizes = dict(self.before)
        for change in self.changes[:moment]:
            sizes[change.storage] = sizes.get(change.storage, 0) + change.size
        return {storage: size for storage, size in sizes.items() if size}

    @property
    def precision(self) -> torch.dtype:
        """The type in which most floating point operations were done."""
        return max(self.flops, key=self.flops.__getitem__, default=torch.float32)


def _in_full(begin: int, end: int, repetitions: Iterable[Repetition]) -> Iterator[int]:
    """The numbers from ``begin`` to ``end``, those of repetitions among them as often as they came."""
    for repetition in repetitions:
        if begin <= repetition.begin and repetition.end <= end:
            yield from range(begin, repetition.begin)
            for _ in range(repetition.times):
                yield from repetition.order
            begin = repetition.end
    yield from range(begin, end)


class _Facts(NamedTuple):
    """Properties of an operator that tracking depends on, whatever its arguments are.

    Attributes:
        name: of the operator.
        is_device: it tells the device of a fake tensor.
        is_primitive: it is none that makes tensors.
        is_composite: it is made of others and nothing else.
        is_view: its results share the memory of its arguments.
        is_mutable: it may write to its arguments.
        replaced: something else is run instead.
        body: what is run with the tracker on; None: the operator itself, without.
        cost: what it declares to take inside.
        counts: whether its floating point operations can be told from its arguments.
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
    counts: bool


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
        cost is None and has_flops(func),
    )


def _body(func: Any, name: str) -> Callable[..., Any] | None:
    """The Python body of a custom operator."""
    definition = None if func.namespace == "aten" else OPDEFS.get(name)
    return None if definition is None else definition._init_fn


def _device_type(tensor: Tensor) -> str:
    # A fake tensor's ``device`` is an operator of its own, and slow.
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type
