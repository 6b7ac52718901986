"""Floating point operations of operators: a multiplication and an addition count two."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating point operations of one call of an operator: of matrix products, 0 for everything else."""
    formula, known = _formulas(func)
    if formula is not None:
        return formula(*args)
    # Some overloads are told in which type to sum; PyTorch's formulas take that for the shape of the result.
    args = tuple(value for value in args if not isinstance(value, torch.dtype))
    return 0 if known is None else int(known(*args, **kwargs, out_val=result))


@cache
def _formulas(func: Any) -> tuple[Callable[..., int] | None, Callable[..., Any] | None]:
    """Our formula for an operator and PyTorch's, where there are any."""
    # addmm_, which writes into its first argument, does what addmm does.
    packet = (
        getattr(aten, func._schema.name.split("::")[1].rstrip("_"), None)
        if func.namespace == "aten"
        else func.overloadpacket
    )
    return _FORMULAS.get(packet), flop_registry.get(packet)


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
    aten.mv: _mv,
    aten.dot: _dot,
    aten.mkldnn_rnn_layer: _onednn,
    aten.mkldnn_rnn_layer_backward: _onednn_backward,
    aten._cudnn_rnn: _cudnn,
    aten._cudnn_rnn_backward: _cudnn_backward,
}
