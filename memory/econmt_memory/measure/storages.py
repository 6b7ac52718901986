"""Record of a computation: storages, changes of their sizes, phases, and the layers of autograd nodes."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from econmt_memory.measure.scopes import current_layer

BLOCK = 512
"""Granularity of CUDA's caching allocator, in bytes."""

PHASES = ("forward", "backward", "optimizer")
"""Phases of a training step, in order."""


class NodeLayers:
    """Finds the layer of an autograd node: the layer whose code created the node in the forward pass.

    Autograd numbers its nodes in order of creation, so it suffices to know at which numbers the current layer changed.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[int, str]] = []
        self._parameters: dict[int, str] = {}

    def add_parameters(self, layers: Mapping[Tensor, str]) -> None:
        """Sets the layers of parameters, whose nodes have no numbers."""
        self._parameters.update({id(parameter): layer for parameter, layer in layers.items()})

    def note(self, layer: str) -> None:
        """Assigns the nodes that are created from now on to ``layer``."""
        self._noted.append((torch._C._autograd._get_sequence_nr(), layer))

    def __call__(self, node: Any) -> str:
        """Returns the layer of a node."""
        if hasattr(node, "variable"):
            return self._parameters.get(id(node.variable), "other")
        return self.of_number(node._sequence_nr())

    def of_number(self, number: int) -> str:
        """Returns the layer of the node with a number."""
        index = bisect_right(self._noted, number, key=itemgetter(0))
        return self._noted[index - 1][1] if index else "other"

    @property
    def are_known(self) -> bool:
        """True if the layers of nodes have been noted."""
        return bool(self._noted)

    def running(self) -> str:
        """Returns the layer of the running code; in a backward pass, that of the node being computed."""
        layer = current_layer()
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
        address: Address of its first byte, in the record of a program's step.
        kept_by: First layer for which autograd keeps it for the backward pass; None if it is not kept.
        line: Line of the program that ran when it was created; empty if it is small or was there before.
        category: Category from :meth:`Tracker.label`, such as weights; None without a label.
    """

    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operator: str
    layer: str
    address: int = 0
    kept_by: str | None = None
    line: str = ""
    category: str | None = None


REPEATED = Storage(0, (), torch.uint8, "", "other")
"""Storage of the changes that stand for repetitions of a loop's body, which add up to no growth."""

UNKNOWN = Storage(0, (), torch.uint8, "", "other")
"""Storage of bytes that were allocated at the start and belong to no known storage."""


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yields the tensors that have the memory of a tensor: itself, or those inside of a wrapper, such as a DTensor."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if type(tensor) in (Tensor, torch.nn.Parameter) or not is_traceable_wrapper_subclass(tensor):
        yield tensor
    else:
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):  # not the mesh of a DTensor
                yield from plain_tensors(part)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns a tensor's shape; the number of its elements for a nested tensor, which has several."""
    return (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)


class Change(NamedTuple):
    """Growth of a storage by ``size`` bytes (shrinkage if negative), ``seconds`` after the start."""

    seconds: float
    storage: Storage
    size: int


class Beginning(NamedTuple):
    """Beginning of a phase: ``seconds`` after the start, after a number of ``changes``."""

    phase: str
    seconds: float
    changes: int


class MemoryRecord:
    """Storages of one device and how their sizes changed.

    Args:
        device: Device whose memory counts.

    Attributes:
        before: Storages that existed before the recording, with their sizes then.
        changes: Changes of sizes, in order.
        begins: Beginnings of phases, in order.
        seconds: Seconds of the whole recording.
        flops: Floating-point operations of matrix products, by the type of their factors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: list[tuple[Storage, int]] = []
        self.changes: list[Change] = []
        self.begins: list[Beginning] = []
        self.seconds = 0.0
        self.flops: Counter[torch.dtype] = Counter()
        self._at_start = self._start = 0

    def settle(self) -> None:
        """Completes the record, after the recording."""

    def since(self, nanoseconds: int) -> float:
        """Returns the seconds from the start of the recording to a moment, in nanoseconds of the epoch."""
        return (nanoseconds - self._start) / 1e9

    def now(self) -> float:
        """Returns the seconds since the start of the recording."""
        return self.since(time.time_ns())

    def begin(self, phase: str) -> None:
        """Begins a phase, one of :data:`PHASES`."""
        self.begins.append(Beginning(phase, self.now(), len(self.changes)))

    def phase_of(self, layer: str, *, updating: bool, in_backward: bool) -> str:
        """Returns the phase of code in a layer; code between phases, such as clipping, belongs to the one before.

        An optimizer's step may run a forward and a backward pass, before it updates.
        """
        if in_backward:
            return "backward"
        if layer != "other":
            return "forward"
        before = self.begins[-1].phase if self.begins else "forward"
        return "optimizer" if updating and before == "backward" else before

    def phase(self) -> str:
        """Returns the current phase."""
        return self.begins[-1].phase if self.begins else "forward"

    def start(self) -> dict[Storage, int]:
        """Returns the storages that existed before the recording, with their bytes; unknown ones are one of them."""
        sizes = dict(self.before)
        unknown = self._at_start - sum(sizes.values())
        return {UNKNOWN: unknown, **sizes} if unknown > 0 else sizes

    def live(self) -> Iterator[int]:
        """Yields the live bytes at the start and after each change."""
        return accumulate((change.size for change in self.changes), initial=sum(self.start().values()))

    def peak(self) -> tuple[int, int]:
        """Returns the most live bytes, and the number of changes before that moment."""
        moment, size = max(enumerate(self.live()), key=itemgetter(1))  # the first of equals
        return size, moment

    def alive(self, moment: int) -> dict[Storage, int]:
        """Returns the storages that are alive after ``moment`` changes, with their bytes."""
        sizes = self.start()
        for change in self.changes[:moment]:
            sizes[change.storage] = sizes.get(change.storage, 0) + change.size
        return {storage: size for storage, size in sizes.items() if size}
