"""One call of every op, for the tests of what all ops have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import econmt_ops
from econmt_ops.cells.protocol import Cell
from econmt_ops.layers.op import OPS
from tests.ops.cases import CASES, Sizes
from tests.ops.helpers import Make


class Call(NamedTuple):
    """An op and the arguments of one call; `first` names the argument whose type decides."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    first: str


def calls(device: str, dtype: torch.dtype) -> dict[str, Call]:
    """Returns a call of every op by name, those with an option that takes another way twice."""
    make = Make(device, dtype)
    lengths = torch.tensor([4, 1, 3], device=device)
    sizes = Sizes(B=3, T=4, S=4, I=5, H=8, A=5, E=6, L=2, R=3)
    dropped = {"lengths": lengths, "dropout": 0.3, "dropout_seed": 4}
    stacked = {"residual": True, **dropped}

    def call(case: str, first: str = "inputs", sizes: Sizes = sizes, **options: Any) -> Call:
        op, tensors, *_ = CASES[case]
        given = {name: value for name, value in tensors(make, sizes).items() if name != "state"}
        return Call(op, {**given, **options}, first)

    def layers_of(cell: Cell) -> tuple[Any, ...]:
        shapes = [cell.parameter_shapes(width, sizes.H).values() for width in (sizes.I, sizes.H)]
        return tuple(cell.weights(*(make(*shape) for shape in layer)) for layer in shapes)

    two = sizes._replace(T=2)
    stack, recurrence = call("lstm", **stacked), call("linear_recurrence")
    loss = {"hidden": make(4, 8), "weight": make(9, 8), "bias": make(9), "label_smoothing": 0.1}
    loss["targets"] = torch.tensor([1, -100, 5, 0], device=device)
    product = {"inputs": make(3, 4, 5), "weight": make(7, 5), "bias": make(7)}
    return {
        "additive_attention": call("additive_attention-norm", "query", two, lengths=lengths),
        "lstm": stack,
        "lstm-reverse": stack._replace(arguments={**stack.arguments, "reverse": True}),
        "lstm-low-rank": call("lstm-low-rank", **stacked),
        "bidirectional_lstm": call("bidirectional", lengths=lengths),
        "bidirectional_lstm-low-rank": call("bidirectional-low-rank", lengths=lengths),
        "attentional_lstm": call("attentional-lstm-additive", sizes=two, **dropped),
        "attentional_lstm-low-rank": call("attentional-low-rank-additive", sizes=two, **dropped),
        "attentional_lstm-norm": call("attentional-lstm-layer_norm", sizes=two, **dropped),
        "attentional_lstm-not-fed-dot": call(
            "attentional-lstm-general-unfed", sizes=two, input_feeding=False, scale=0.5, **dropped
        ),
        "linear": Call(econmt_ops.linear, product, "inputs"),
        "linear-column": Call(econmt_ops.linear, {**product, "layout": "column"}, "inputs"),
        "linear_cross_entropy": Call(econmt_ops.linear_cross_entropy, loss, "hidden"),
        "linear_recurrence": recurrence,
        **{
            f"{name}{f'-{number}' * (number > 0)}": Call(
                op, {**stack.arguments, "layers": layers_of(cell)}, "inputs"
            )
            for name, op in OPS.items()
            for number, cell in enumerate(op.cells)
        },
        "linear_recurrence-reverse": recurrence._replace(
            arguments={**recurrence.arguments, "lengths": lengths, "reverse": True}
        ),
    }


each_op = pytest.mark.parametrize("op", list(calls("cpu", torch.float32)))
