"""Operators and allocations of a step, read from the events of PyTorch's profiler."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from econmt_memory.measure.allocations import OUTSIDE
from econmt_memory.measure.operators import OperatorFacts, look_at

_NODE = "autograd::engine::evaluate_function: "
_UPDATE = "Optimizer.step#"


class NodeRun(NamedTuple):
    """Run of an autograd node in a backward pass.

    Attributes:
        sequence: Number of the node in the order of creation; -1 for the node that accumulates a parameter's gradient.
        is_nested: True if another node runs it, as reentrant checkpointing does.
    """

    sequence: int
    is_nested: bool


class AttributedAllocation(NamedTuple):
    """Allocation of ``size`` bytes at an address (release if negative), and the operator and node that made it.

    ``total`` is what the allocator of a GPU had given out afterwards, in bytes.
    """

    nanoseconds: int
    address: int
    size: int
    total: int
    operator: str
    node: NodeRun | None


class ProfiledOperator(NamedTuple):
    """Operator that began at a time, in nanoseconds of the epoch, with the profiler's description of its inputs."""

    begin: int
    node: NodeRun | None
    inputs: list[Any]


def read_events(
    result: Any, device: torch.device
) -> tuple[list[ProfiledOperator], list[AttributedAllocation]]:
    """Returns the operators that the profiler has recorded, and the allocations on a device in order.

    An operator that consists of others does not count, but those do.
    """
    operators: list[ProfiledOperator] = []
    allocations: list[AttributedAllocation] = []
    waiting: list[tuple[Any, str, NodeRun | None]] = [
        (event, "", None) for event in result.experimental_event_tree()
    ]
    while waiting:
        event, operator, node = waiting.pop()
        kind, fields = event.typed
        if kind.name == "Allocation":
            where = fields.device
            if where.type == device.type and device.index in (None, where.index):
                sizes = fields.ptr, fields.alloc_size, fields.total_allocated
                maker = operator or OUTSIDE
                allocations.append(AttributedAllocation(event.start_time_ns, *sizes, maker, node))
        elif kind.name == "TorchOp":
            name = fields.name
            if name.startswith(_NODE):
                node = NodeRun(fields.sequence_number, node is not None)
            elif name.startswith(_UPDATE) and all(each.tag.name == "Allocation" for each in event.children):
                operator = name.removeprefix(_UPDATE)  # whose operators are not recorded
            elif not operator and "::" in name:
                facts = _known(name)
                if facts is not None and not facts.is_composite and not facts.is_primitive:
                    operator = facts.name
                    operators.append(ProfiledOperator(event.start_time_ns, node, fields.inputs))
        waiting += [(child, operator, node) for child in event.children]
    allocations.sort(key=lambda each: each.nanoseconds)
    return operators, allocations


@lru_cache(None)
def _known(name: str) -> OperatorFacts | None:
    """Returns the properties of an operator, which its overloads share; None: it is no operator."""
    namespace, _, operator = name.partition("::")
    packet = None if "::" in operator else getattr(getattr(torch.ops, namespace), operator, None)
    return None if packet is None else look_at(getattr(packet, packet.overloads()[0]), {})


def tensors_of(inputs: list[Any]) -> list[Any]:
    """Returns the descriptions of dense tensors among an operator's inputs and in its lists of tensors."""
    tensors = []
    for each in inputs:
        if isinstance(each, list):
            tensors += tensors_of(each)
        elif hasattr(each, "storage_data_ptr") and each.storage_data_ptr and each.layout is torch.strided:
            tensors.append(each)
    return tensors


def extent_of(tensor: Any) -> int:
    """Returns the bytes from a tensor's first element to its last one."""
    if 0 in tensor.sizes:
        return 0
    steps = zip(tensor.sizes, tensor.strides, strict=True)
    return int((1 + sum((size - 1) * stride for size, stride in steps)) * tensor.dtype.itemsize)
