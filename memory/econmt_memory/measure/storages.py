"""Records of a computation: storages, changes of their sizes, phases, and the layers of autograd nodes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from econmt_memory.measure.scopes import current_layer
from econmt_memory.measure.user_lines import UserLine

BLOCK = 512
"""Granularity of CUDA's caching allocator, in bytes."""

PHASES = ("forward", "backward", "optimizer")
"""Phases of a training step, in order."""


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
        return self.of_number(node._sequence_nr())

    def of_number(self, number: int) -> str:
        """Returns the layer of the node with a number."""
        index = bisect_right(self._numbers, number)
        return self._layers[index - 1] if index else "other"

    @property
    def are_known(self) -> bool:
        """True if the layers of nodes have been noted."""
        return bool(self._numbers)

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
        address: Address of its first byte; 0 for fake tensors.
        kept_by: First layer for which autograd keeps it for the backward pass; None if it is not kept.
        line: Line of the program that ran when it was created; None if it is small or was there before.
        category: Category from :meth:`Tracker.label`, such as weights; None without a label.
    """

    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operator: str
    layer: str
    address: int
    kept_by: str | None = None
    line: UserLine | None = None
    category: str | None = None


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yields the tensors that have the memory of a tensor: itself, or those inside of a wrapper, such as a DTensor."""
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


class Work(NamedTuple):
    """Operator that ran from ``begin`` to ``end``, in seconds after the start, within a layer and a phase."""

    begin: float
    end: float
    operator: str
    layer: str
    phase: str
    flops: int


class Hidden(NamedTuple):
    """Bytes that an operator used and freed internally."""

    size: int
    layer: str
    operator: str


class Beginning(NamedTuple):
    """Beginning of a phase: ``seconds`` after the start, after a number of ``changes``."""

    phase: str
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


def expanded(begin: int, end: int, repetitions: Iterable[Repetition]) -> Iterator[int]:
    """Yields the indices of changes from ``begin`` to ``end``, those of repetitions as often as they occurred."""
    for repetition in repetitions:
        if begin <= repetition.begin and repetition.end <= end:
            yield from range(begin, repetition.begin)
            for _ in range(repetition.times):
                yield from repetition.order
            begin = repetition.end
    yield from range(begin, end)
