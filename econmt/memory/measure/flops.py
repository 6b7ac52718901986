"""Floating point operations of operators: a multiplication and an addition count two."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating point operations of one call of an operator: of matrix products, 0 for everything else.

    An operator that is not PyTorch's own may have registered its formula with PyTorch.
    """
    if func.namespace == "aten":
        formula = _aten_formula(func)
        return 0 if formula is None else formula(*args)
    known = _registered_formula(func)
    return 0 if known is None else int(known(*args, **kwargs, out_val=result))


def has_flops(func: Any) -> bool:
    """Returns True if an operator has floating-point operations that count."""
    formula = _aten_formula(func) if func.namespace == "aten" else _registered_formula(func)
    return formula is not None


def _registered_formula(func: Any) -> Callable[..., Any] | None:
    # Who has registered a formula has imported this. It is not imported here: it brings all of Triton with it.
    counter = sys.modules.get("torch.utils.flop_counter")
    found: Callable[..., Any] | None = (
        None if counter is None else counter.flop_registry.get(func.overloadpacket)
    )
    return found


@cache
def _aten_formula(func: Any) -> Callable[..., int] | None:
    """The formula for an operator of PyTorch's."""
    # addmm_, which writes into its first argument, does what addmm does.
    return _FORMULAS.get(getattr(aten, func._schema.name.split("::")[1].rstrip("_"), None))


def _product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Returns the operations of a product of matrices, or of two stacks of them."""
    return 2 * left.numel() * right.shape[-1]


def _added_product(_start: Tensor, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return _product(left, right)


def _mv(matrix: Tensor, _vector: Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _dot(left: Tensor, _right: Tensor) -> int:
    return 2 * left.numel()


def lstm_flops(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """Forward operations of one LSTM layer in one direction: four gates, each a product of [x ; h]."""
    return 2 * steps * batch * (inputs + hidden) * 4 * hidden


def _onednn(inputs: Tensor, weight: Tensor, recurrent: Tensor, *_: Any) -> int:
    return lstm_flops(inputs.shape[0], inputs.shape[1], weight.shape[1], recurrent.shape[1])


def _onednn_backward(inputs: Tensor, weight: Tensor, recurrent: Tensor, *rest: Any) -> int:
    return 2 * _onednn(inputs, weight, recurrent, *rest)


def _cudnn(inputs: Tensor, weights: list[Tensor], stride: int, *_: Any) -> int:
    # cuDNN gets inputs (T, B, I) or, batch first, (B, T, I): the product of the two is the same.
    steps, batch, _size = inputs.shape
    return sum(
        lstm_flops(steps, batch, weights[first].shape[1], weights[first + 1].shape[1])
        for first in range(0, len(weights), stride)
    )


def _cudnn_backward(inputs: Tensor, weights: list[Tensor], stride: int, *rest: Any) -> int:
    return 2 * _cudnn(inputs, weights, stride, *rest)


_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten.addmm: _added_product,
    aten.baddbmm: _added_product,
    aten.mv: _mv,
    aten.dot: _dot,
    aten.mkldnn_rnn_layer: _onednn,
    aten.mkldnn_rnn_layer_backward: _onednn_backward,
    aten._cudnn_rnn: _cudnn,
    aten._cudnn_rnn_backward: _cudnn_backward,
}
