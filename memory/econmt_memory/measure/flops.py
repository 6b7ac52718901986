"""Floating-point operations of operators; a multiplication and an addition count as two."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


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


def _convolution(
    inputs: Tensor,
    weight: Tensor,
    *rest: Any,
    out_val: Tensor | None = None,
    transposed: bool | None = None,
) -> int:
    """Returns the operations of a convolution: each weight meets each output, or each input if it is transposed."""
    at_inputs = bool(rest[4]) if transposed is None else transposed
    places = inputs if at_inputs or out_val is None else out_val
    return 2 * places.numel() * weight[0].numel()


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    transposed, needed = rest[4], rest[7]
    return int(sum(needed[:2])) * _convolution(inputs, weight, out_val=gradient, transposed=transposed)


def _attention(first: int, products: int, *args: Any, **_: Any) -> int:
    """Returns the operations of products as large as the scores; queries and keys are the arguments from ``first`` on.

    A causal mask saves none. The backward pass computes the scores again.
    """
    queries, keys = args[first : first + 2]
    return 2 * products * int(queries.numel() * keys.shape[-2])


_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")

_FORMULAS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot), partial(_product, 0)),
    **dict.fromkeys((aten.addmm, aten.baddbmm), partial(_product, 1)),
    aten.mkldnn_rnn_layer: _onednn,
    aten.mkldnn_rnn_layer_backward: lambda *arguments, **_: 2 * _onednn(*arguments),
    aten._cudnn_rnn: _cudnn,
    aten._cudnn_rnn_backward: lambda *arguments, **_: 2 * _cudnn(*arguments),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    **{getattr(aten, f"_scaled_dot_product_{name}"): partial(_attention, 0, 2) for name in _ATTENTION},
    **{
        getattr(aten, f"_scaled_dot_product_{name}_backward"): partial(_attention, 1, 5)
        for name in _ATTENTION
    },
}
