"""One call of every op, for the tests of what all ops have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import econmt_ops
from econmt_ops import AttentionalLSTMWeights
from econmt_ops.cells.protocol import Cell
from econmt_ops.layers.op import OPS
from tests.ops.helpers import Make


class Call(NamedTuple):
    """An op and the arguments of one call; `first` names the argument whose type decides."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    first: str


def layers_of(make: Make, cell: Cell) -> tuple[Any, ...]:
    """Weights of two layers of a cell, of 5 inputs and 8 units."""
    return tuple(
        cell.weights(*(make(*shape) for shape in cell.parameter_shapes(width, 8).values()))
        for width in (5, 8)
    )


def calls(device: str, dtype: torch.dtype) -> dict[str, Call]:
    """Returns a call of every op by name, those with an option that takes another way twice."""
    make = Make(device, dtype)
    lengths = torch.tensor([4, 1, 3], device=device)
    attend = {
        "query": make(3, 2, 5),
        "keys": make(3, 4, 5),
        "values": make(3, 4, 6),
        "score_weight": make(5),
        "lengths": lengths,
        "layer_norm": (make(5), make(5)),
    }
    dropped = {"lengths": lengths, "dropout": 0.3, "dropout_seed": 4}
    stack = {"inputs": make(3, 4, 5), "layers": make.layers(5, 8, 2), "residual": True, **dropped}
    both = {"inputs": make(3, 4, 5), "forward": make.layer(5, 8), "backward": make.layer(5, 8)}
    both["lengths"] = lengths
    thin = {**stack, "layers": make.low_rank_layers(5, 8, 2, 3)}
    thin_both = {**both, "forward": make.low_rank_layer(5, 8, 2), "backward": make.low_rank_layer(5, 8, 2)}
    weights = AttentionalLSTMWeights(make.layers(5 + 8, 8, 2), make(5, 8), make(5), make(8, 8 + 6), make(8))
    decoder = {"inputs": make(3, 2, 5), "keys": make(3, 4, 5), "values": make(3, 4, 6), "weights": weights}
    decoder |= dropped
    unscored = weights._replace(layers=make.layers(5, 8, 2), score=None)
    unfed = {**decoder, "weights": unscored, "input_feeding": False, "scale": 0.5}
    normed = {**decoder, "layer_norm": (make(5), make(5))}
    thin_decoder = {**decoder, "weights": weights._replace(layers=make.low_rank_layers(5 + 8, 8, 2, 3))}
    targets = torch.tensor([1, -100, 5, 0], device=device)
    loss = {"hidden": make(4, 8), "weight": make(9, 8), "targets": targets, "bias": make(9)}
    loss["label_smoothing"] = 0.1
    recurrence = {"decay": make(3, 4, 5).sigmoid(), "inputs": make(3, 4, 5), "initial": make(3, 5)}
    cells = {
        f"{name}{f'-{number}' * (number > 0)}": Call(op, {**stack, "layers": layers_of(make, cell)}, "inputs")
        for name, op in OPS.items()
        for number, cell in enumerate(op.cells)
    }
    turned = {**recurrence, "lengths": lengths, "reverse": True}
    product = {"inputs": make(3, 4, 5), "weight": make(7, 5), "bias": make(7)}
    return {
        "additive_attention": Call(econmt_ops.additive_attention, attend, "query"),
        "lstm": Call(econmt_ops.lstm, stack, "inputs"),
        "lstm-reverse": Call(econmt_ops.lstm, {**stack, "reverse": True}, "inputs"),
        "lstm-low-rank": Call(econmt_ops.lstm, thin, "inputs"),
        "bidirectional_lstm": Call(econmt_ops.bidirectional_lstm, both, "inputs"),
        "bidirectional_lstm-low-rank": Call(econmt_ops.bidirectional_lstm, thin_both, "inputs"),
        "attentional_lstm": Call(econmt_ops.attentional_lstm, decoder, "inputs"),
        "attentional_lstm-low-rank": Call(econmt_ops.attentional_lstm, thin_decoder, "inputs"),
        "attentional_lstm-norm": Call(econmt_ops.attentional_lstm, normed, "inputs"),
        "attentional_lstm-not-fed-dot": Call(econmt_ops.attentional_lstm, unfed, "inputs"),
        "linear": Call(econmt_ops.linear, product, "inputs"),
        "linear-column": Call(econmt_ops.linear, {**product, "layout": "column"}, "inputs"),
        "linear_cross_entropy": Call(econmt_ops.linear_cross_entropy, loss, "hidden"),
        "linear_recurrence": Call(econmt_ops.linear_recurrence, recurrence, "inputs"),
        **cells,
        "linear_recurrence-reverse": Call(econmt_ops.linear_recurrence, turned, "inputs"),
    }


each_op = pytest.mark.parametrize("op", list(calls("cpu", torch.float32)))
