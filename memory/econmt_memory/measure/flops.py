"""Floating-point operations of operators; a multiplication and an addition count as two."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def _product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Returns the operations of a product of matrices, or of two stacks of them."""
    return 2 * left.numel() * right.shape[-1]


def _added_product(_start: Tensor, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _product(left, right)


def _vector_product(left: Tensor, *_: Any, **__: Any) -> int:
    return 2 * left.numel()


def _lstm(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """Returns the forward operations of an LSTM layer in one direction: four gates, each a product with [x ; h]."""
    return 2 * steps * batch * (inputs + hidden) * 4 * hidden


def _onednn(inputs: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    return _lstm(inputs.shape[0], inputs.shape[1], weight.shape[1], recurrent.shape[1])


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


def _attention(queries: Tensor, keys: Tensor, *_: Any, **__: Any) -> int:
    """Returns the operations of scores and weighted sums; a causal mask saves none of them."""
    return 4 * queries.numel() * keys.shape[-2]


def _attention_backward(_gradient: Tensor, queries: Tensor, keys: Tensor, *_: Any, **__: Any) -> int:
    """Returns the operations of five products, since the scores are computed again."""
    return 10 * queries.numel() * keys.shape[-2]


_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")

_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten.addmm: _added_product,
    aten.baddbmm: _added_product,
    aten.mv: _vector_product,
    aten.dot: _vector_product,
    aten.mkldnn_rnn_layer: _onednn,
    aten.mkldnn_rnn_layer_backward: lambda *arguments, **_: 2 * _onednn(*arguments),
    aten._cudnn_rnn: _cudnn,
    aten._cudnn_rnn_backward: lambda *arguments, **_: 2 * _cudnn(*arguments),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    **{getattr(aten, f"_scaled_dot_product_{name}"): _attention for name in _ATTENTION},
    **{getattr(aten, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _ATTENTION},
}
