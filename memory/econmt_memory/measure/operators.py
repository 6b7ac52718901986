"""Properties of operators that a tracker needs to know, independent of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from econmt_memory.measure.flops import flops_formula
from econmt_memory.measure.ops_package import cost_of

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""Dispatch key of operators that consist of others."""


class OperatorFacts(NamedTuple):
    """Properties of an operator that do not depend on its arguments.

    Attributes:
        is_device: True if it returns the device of a fake tensor.
        is_primitive: True if it creates no tensors.
        is_composite: True if it consists of other operators, and no device has a kernel of its own for it.
        is_view: True if its results share the memory of its arguments.
        is_mutable: True if it may write to its arguments.
        replaced: True if a replacement runs instead.
        body: Function that runs with the tracker on; None: the operator runs, without the tracker.
        cost: Returns the internal bytes and the operations that it declares.
        flops: Formula of its floating-point operations, unless it declares them.
        workspace: Returns internal bytes that a prediction assumes.
    """

    name: str
    is_device: bool
    is_primitive: bool
    is_composite: bool
    is_view: bool
    is_mutable: bool
    replaced: bool
    body: Callable[..., Any] | None
    cost: Callable[..., tuple[int, int]] | None
    flops: Callable[..., int] | None
    workspace: Callable[..., int] | None = None


def look_at(func: Any, replacements: Mapping[OpOverload[..., Any], Callable[..., Any]]) -> OperatorFacts:
    """Returns the properties of an operator."""
    name = str(func._schema.name)
    replacement = replacements.get(func)
    cost = None if func.namespace == "aten" else cost_of(name)
    is_primitive = func.namespace == "prim"
    return OperatorFacts(
        name.replace("::", "."),
        func is torch.ops.prim.device.default,
        is_primitive,
        not is_primitive and _has_kernel(func, COMPOSITE) and not _has_kernel(func, torch._C.DispatchKey.CPU),
        func.is_view and replacement is None,
        func._schema.is_mutable,
        replacement is not None,
        replacement or (None if cost else getattr(OPDEFS.get(name), "_init_fn", None)),
        cost,
        None if cost else flops_formula(func),
    )


def _has_kernel(func: Any, key: torch._C.DispatchKey) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
