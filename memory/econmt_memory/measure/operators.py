"""Properties of operators that a tracker needs to know, and formulas of their floating-point operations.

A multiplication and an addition count as two operations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from econmt_memory.measure.ops_package import cost_of

aten = torch.ops.aten

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""Dispatch key of operators that consist of others."""


class OperatorFacts(NamedTuple):
    """Properties of an operator that do not depend on its arguments.

    Attributes:
        is_primitive: True if it creates no tensors.
        is_composite: True if it consists of other operators, and no device has a kernel of its own for it.
        is_view: True if its results share the memory of its arguments.
        is_mutable: True if it may write to its arguments.
        replaced: True if a replacement runs instead.
        body: Function that runs with the tracker on; None: the operator runs, without the tracker.
        flops: Formula of its floating-point operations; called with its arguments, and its result as ``out_val``.
        workspace: Returns internal bytes that it declares or that a prediction assumes.
    """

    name: str
    is_primitive: bool
    is_composite: bool
    is_view: bool
    is_mutable: bool
    replaced: bool
    body: Callable[..., Any] | None
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
        is_primitive,
        not is_primitive and _has_kernel(func, COMPOSITE) and not _has_kernel(func, torch._C.DispatchKey.CPU),
        func.is_view and replacement is None,
        func._schema.is_mutable,
        replacement is not None,
        replacement or (None if cost else getattr(OPDEFS.get(name), "_init_fn", None)),
        partial(_declared, cost, 1) if cost else flops_formula(func),
        partial(_declared, cost, 0) if cost else None,
    )


def _declared(cost: Callable[..., tuple[int, int]], part: int, *args: Any, **kwargs: Any) -> int:
    """Returns the internal bytes or the operations that an operator declares."""
    kwargs.pop("out_val", None)
    return cost(*args, **kwargs)[part]


def _has_kernel(func: Any, key: torch._C.DispatchKey) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def flops_formula(func: Any) -> Callable[..., int] | None:
    """Returns the formula for an operator's operations, called with its arguments and its result as ``out_val``.

    PyTorch's own operators count if they are matrix products, others if their formula is registered with PyTorch. None
    means no operations.
    """
    if func.namespace == "aten":
        # addmm_, which writes into its first argument, has the formula of addmm.
        return _FORMULAS.get(getattr(aten, func._schema.name.split("::")[1].rstrip("_"), None))
    # Who has registered a formula has imported this module. It is not imported here, since it brings all of Triton.
    counter = sys.modules.get("torch.utils.flop_counter")
    return None if counter is None else counter.flop_registry.get(func.overloadpacket)


def _product(first: int, *args: Any, **_: Any) -> int:
    """Returns the operations of a product of two arguments, from ``first`` on: matrices, stacks of them, or vectors."""
    left, right = args[first : first + 2]
    return 2 * int(left.numel()) * (right.shape[-1] if right.dim() > 1 else 1)


def _onednn(inputs: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """Returns the operations of an LSTM layer (T, B, I) in one direction: four gates, each a product with [x ; h]."""
    steps, batch = inputs.shape[:2]
    return 2 * steps * batch * (weight.numel() + recurrent.numel())


def _cudnn(inputs: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Returns the operations of a recurrent network: each weight meets each position (..., I), packed or padded."""
    positions = inputs.numel() // inputs.shape[-1]
    return 2 * positions * sum(weight.numel() for weight in weights if weight.dim() == 2)


_FORMULAS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), partial(_product, 0)),
    **dict.fromkeys((aten.addmm, aten.baddbmm), partial(_product, 1)),
    aten.mkldnn_rnn_layer: _onednn,
    aten.mkldnn_rnn_layer_backward: lambda *arguments, **_: 2 * _onednn(*arguments),
    aten._cudnn_rnn: _cudnn,
    aten._cudnn_rnn_backward: lambda *arguments, **_: 2 * _cudnn(*arguments),
}
