"""Arguments that do not fit an op are refused by their names, before any implementation sees them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import econmt_ops
from econmt_ops import (
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    GateWeights,
    LowRank,
    LSTMWeights,
    UniqueRows,
)
from econmt_ops.core.shapes import Shapes
from tests.ops.cases import CASES, Parts, Sizes, decoder
from tests.ops.helpers import Make

SIZES = Sizes(B=3, T=4, S=5, I=3, H=6, A=7, E=4, L=2)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def changed(tree: Any, path: list[str], value: Any) -> Any:
    """Returns nested dicts, tuples and named tuples with another value at a path."""
    if not path:
        return value
    name, *rest = path
    if isinstance(tree, dict):
        return {**tree, name: changed(tree.get(name), rest, value)}
    if hasattr(tree, "_replace"):
        return tree._replace(**{name: changed(getattr(tree, name), rest, value)})
    return tuple(changed(part, rest, value) if k == int(name) else part for k, part in enumerate(tree))


def problems() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Ops and arguments that fit, by name."""
    parts = {
        str(each): decoder(each) for each in (Parts(normed=True, gated=True, coverage="tanh"), Parts("gru"))
    }
    found = {
        name: (case.op, {**case.tensors(Make("cpu"), SIZES), **case.options, "lengths": None})
        for name, case in (CASES | parts).items()
    }
    product = {"inputs": ones(3, 7), "weight": ones(9, 7), "bias": ones(9)}
    targets = torch.zeros(6, dtype=torch.int64)
    loss = {"hidden": ones(6, 3), "weight": ones(5, 3), "bias": ones(5), "targets": targets}
    return found | {
        "linear": (econmt_ops.linear, product),
        "linear_cross_entropy": (econmt_ops.linear_cross_entropy, loss),
    }


PROBLEMS = problems()
LAYER = LSTMWeights(torch.ones(24, 3), torch.ones(24, 6), torch.ones(24))
H = (ones(3, 6),) * 2
MORE = "attentional-lstm-tanh-additive-normed-gated"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {  # "*" in a message is any text
    "lstm": [
        ({"inputs": ones(3, 3)}, "inputs must be (B, T, I), got (3, 3)"),
        ({"inputs": ones(3, 4, 5)}, "layers[0].input must be (4H, I) with 4H=24, I=5, got (24, 3)"),
        ({"inputs": ones(3, 4, 3).to_sparse()}, "inputs must be a dense tensor, got torch.sparse_coo"),
        ({"inputs": torch.ones(3, 4, 3).to(torch.float8_e4m3fn)}, "inputs must be float64, float32"),
        ({"inputs": UniqueRows(ones(4, 3), torch.full((3, 4), 4))}, "places must be from 0 to 3, got 4"),
        ({"inputs": UniqueRows(ones(4, 3), torch.zeros(3, 4).int())}, "places must be an int64 tensor, got"),
        ({"inputs": UniqueRows(ones(4, 3, 1), torch.zeros(3, 4).long())}, "inputs.rows must be (N, I), got"),
        ({"inputs": UniqueRows(ones(4, 2), torch.zeros(3, 4).long())}, "layers[0].input must be * I=2"),
        ({"layers": ()}, "layers is empty, at least one is needed"),
        ({"layers": LAYER}, "layers must be a tuple of LSTMWeights *, got one LSTMWeights; write (weights,)"),
        ({"layers": ones(2, 3)}, "layers must be a tuple *, got a tensor of shape (2, 3)"),
        ({"layers": None}, "layers must be a tuple *, got None"),
        ({"layers.1": ones(8)}, "layers[1] must be LSTMWeights or LowRankLSTMWeights, got a tensor"),
        ({"layers.0": tuple(LAYER)}, "layers[0] must be LSTMWeights *, got a value of type tuple"),
        ({"layers.0.bias": None}, "layers[0].bias must be a tensor, got None"),
        ({"layers.0.hidden": 5}, "hidden must be a tensor, got a value of type int"),
        ({"layers.0.bias": ones(24).to("meta")}, "bias is on meta, the arguments before it on cpu"),
        ({"layers.1.hidden": ones(24, 5)}, "layers[1].hidden must be (4H, H) with 4H=24, H=6, got (24, 5)"),
        ({"layers.1.input": ones(24, 3)}, "layers[1].input must be (4H, H) with 4H=24, H=6, got (24, 3)"),
        ({"layers.1.bias": ones(6)}, "layers[1].bias must be (4H,) with 4H=24, got (6,)"),
        ({"state": (H,)}, "state must be a tuple of (h, c), one for each of 2 layers, got a tuple of 1"),
        ({"state": H}, "state[0] must be (h, c), got a tensor"),
        ({"state": ((ones(3, 6), ones(1, 6)),) * 2}, "state[0] c must be (B, H) with B=3, H=6, got (1, 6)"),
        ({"lengths": torch.ones(2).long()}, "lengths must be (B,) with B=3, got (2,)"),
        ({"lengths": torch.ones(3)}, "lengths must be an int64 tensor, got torch.float32"),
        ({"lengths": [4]}, "lengths must be a tensor, got a value of type list"),
        ({"lengths": torch.ones(3, device="meta").long()}, "lengths is on meta, the other arguments on cpu"),
        *(
            ({"lengths": torch.tensor([4, wrong, 1])}, f"lengths must be from 0 to 4, got {wrong}$")
            for wrong in (5, -1, 2**62)
        ),
        ({"dropout": 0.5}, "dropout 0.5 needs dropout_seed, an int"),
        *(
            (
                {"dropout": wrong, "dropout_seed": 1},
                f"dropout must be at least 0 and less than 1, got {wrong}$",
            )
            for wrong in (1.0, -0.1, float("nan"))
        ),
        ({"dropout": "x"}, "dropout must be at least 0 and less than 1, got x"),
        ({"dropout": 0.5, "dropout_seed": "x"}, "dropout_seed must be an int of 64 bits"),
        ({"dropout": 0.5, "dropout_seed": 2**64}, "dropout_seed must be an int of 64"),
        ({"stash": "all"}, "unknown stash level 'all'; available: auto, least, outputs"),
        ({"implementation": "none"}, "unknown implementation 'none'"),
        ({"gate_gradient": ones(4, 3, 24)}, "gate_gradient requires one layer of LSTMWeights"),
    ],
    "lstm-low-rank": [
        (
            {"layers.0.input": LowRank(ones(24, 2), ones(3, 3))},
            "layers[0].input.left must be (4H, layers[0].input.rank) with 4H=24, *rank=3, got (24, 2)",
        ),
        (
            {"layers.0.hidden": LowRank(ones(20, 2), ones(2, 6))},
            "layers[0].hidden.left must be *4H=24*got (20, 2)",
        ),
        (
            {"layers.0.hidden": LowRank(ones(24, 0), ones(0, 6))},
            "layers[0].hidden must have a rank of at least 1, got 0",
        ),
        ({"layers.1": Make("cpu").layer(6, 6)}, "layers[1] must be LowRankLSTMWeights, as layers[0] is"),
    ],
    "bidirectional": [
        ({"inputs": ones(3, 3)}, "inputs must be (B, T, I), got (3, 3)"),
        ({"inputs": ones(3, 4, 5)}, "forward.input must be (4H, I) with 4H=24, I=5, got (24, 3)"),
        ({"inputs": UniqueRows(ones(4, 3), torch.full((3, 4), -1))}, "places must be from 0 to 3, got -1"),
        ({"backward.hidden": ones(24, 5)}, "backward.hidden must be (4H, H) with 4H=24, H=6, got (24, 5)"),
        ({"backward.bias": ones(20)}, "backward.bias must be (4H,) with 4H=24, got (20,)"),
        ({"backward": (LAYER,)}, "backward must be LSTMWeights"),
        ({"lengths": torch.ones(2).long()}, "lengths must be (B,) with B=3, got (2,)"),
        ({"lengths": torch.full((3,), 5)}, "lengths must be from 0 to 4, got 5"),
    ],
    "bidirectional-low-rank": [
        ({"backward": Make("cpu").layer(3, 6)}, "backward must be LowRankLSTMWeights, as forward is")
    ],
    "attentional-lstm-additive": [
        ({"inputs": ones(3, 3)}, "inputs must be (B, T, I), got (3, 3)"),
        ({"inputs": ones(3, 4, 2)}, "layers[0].input must be (4H, I+H) with 4H=24, I+H=8, got (24, 9)"),
        ({"input_feeding": False}, "layers[0].input must be (4H, I) with 4H=24, I=3, got (24, 9)"),
        ({"weights.layers": ()}, "layers is empty, at least one is needed"),
        ({"weights": LAYER}, "weights must be AttentionalLSTMWeights, got a value"),
        (
            {"weights": AttentionalLSTMWeights(LAYER, None, None, ones(2, 5), None)},
            "layers must be * (weights,)",
        ),  # type: ignore[arg-type]
        ({"weights.query": ones(7, 5)}, "weights.query must be (A, H) with H=6, got (7, 5)"),
        ({"weights.query": None}, "keys must be (B, S, A) with B=3, A=6, got (3, 5, 7)"),
        ({"keys": ones(3, 5, 8)}, "keys must be (B, S, A) with B=3, A=7, got (3, 5, 8)"),
        ({"values": ones(3, 6, 4)}, "values must be (B, S, E) with B=3, S=5, got (3, 6, 4)"),
        ({"weights.score": ones(6)}, "weights.score must be (A,) with A=7, got (6,)"),
        ({"weights.combine": ones(6, 11)}, "weights.combine must be (H, H+E) with H=6, H+E=10, got (6, 11)"),
        ({"weights.combine_bias": ones(4)}, "weights.combine_bias must be (H,) with H=6, got (4,)"),
        ({"lengths": torch.ones(2).long()}, "lengths must be (B,) with B=3, got (2,)"),
        ({"layer_norm": (ones(6), ones(7))}, "layer_norm gain must be (A,) with A=7, got (6,)"),
        ({"scale": 0.5}, "scale applies to dot attention only; with weights.score it must be 1, got 0.5"),
        ({"weights.score": None, "layer_norm": (ones(7), ones(7))}, "layer_norm requires additive attention"),
        ({"dropout": 0.1}, "dropout 0.1 needs dropout_seed, an int"),
        (
            {"state": AttentionalLSTMState((H,) * 2, ones(3, 5))},
            "state.output must be (B, H) with B=3, H=6, got (3, 5)",
        ),
        (
            {"state": AttentionalLSTMState((H,), ones(3, 6))},
            "state must be a tuple of (h, c), one for each of 2 layers, got a tuple of 1",
        ),
    ],
    MORE: [
        ({"weights.coverage.kind": "sums"}, "coverage.kind must be one of"),
        ({"weights.score": None}, "coverage needs weights.score"),
        ({"input_feeding": False, "weights.layers.0.input": ones(24, 3)}, "coverage needs input_feeding"),
        ({"weights.coverage.state": None}, "coverage.state must be a tensor for kind tanh"),
        ({"weights.coverage.shares": ones(3, 5, 3)}, "coverage.shares must be"),
        ({"weights.combine_bias": None}, "gate needs weights.combine_bias"),
        ({"weights.output_norm": (ones(3), ones(6))}, "output_norm gain must be"),
    ],
    "attentional-gru-additive": [({"weights.layers.1.hidden_bias": ones(3)}, "layers[1].hidden_bias must")],
    "additive_attention": [
        ({"query": ones(3, 7)}, "query must be (B, T, A), got (3, 7)"),
        ({"query": ones(3, 4, 7).long()}, "query must be a floating point tensor, got torch.int64"),
        ({"keys": ones(2, 5, 7)}, "keys must be (B, S, A) with B=3, A=7, got (2, 5, 7)"),
        ({"keys": ones(3, 5, 6)}, "keys must be (B, S, A) with B=3, A=7, got (3, 5, 6)"),
        ({"values": ones(3, 4, 4)}, "values must be (B, S, E) with B=3, S=5, got (3, 4, 4)"),
        ({"score_weight": ones(7, 1)}, "score_weight must be (A,) with A=7, got (7, 1)"),
        ({"lengths": torch.ones(2).long()}, "lengths must be (B,) with B=3, got (2,)"),
        ({"lengths": torch.ones(3).int()}, "lengths must be an int64 tensor, got torch.int32"),
        ({"lengths": torch.full((3,), -1)}, "lengths must be from 0 to 5, got -1"),
        ({"layer_norm": (ones(7), ones(6))}, "layer_norm bias must be (A,) with A=7, got (6,)"),
        ({"layer_norm": (ones(7),)}, "layer_norm must be (gain, bias), got a value of type tuple"),
    ],
    "linear_recurrence": [
        ({"decay": ones(3, 5)}, "decay must be (B, T, H) with B=3, T=4, H=6, got (3, 5)"),
        *(
            ({"decay": ones(*shape)}, "decay must be (B, T, H) with B=3, T=4, H=6, got (")
            for shape in ((4,), (1,), (2, 4, 6), (3, 1), (1, 3, 4, 6), (3, 5, 6))
        ),
        ({"decay": 0.5}, "decay must be a tensor, got a value of type float"),
        ({"initial": ones(6, 3)}, "initial must be (B, H) with B=3, H=6, got (6, 3)"),
        ({"lengths": torch.ones(3).int()}, "lengths must be an int64 tensor, got torch.int32"),
        ({"lengths": torch.tensor([3, -1, 1])}, "lengths must be from 0 to 4, got -1"),
        ({"lengths": torch.tensor([3, 5, 1])}, "lengths must be from 0 to 4, got 5"),
    ],
    "linear": [
        ({"inputs": ones(3, 6)}, "inputs must be (..., I) with I=7, got (3, 6)"),
        ({"inputs": ones()}, "inputs must be (..., I) with I=7, got ()"),
        ({"inputs": [[1.0]]}, "inputs must be a tensor, got a value of type list"),
        ({"weight": ones(9)}, "weight must be (O, I), got (9,)"),
        ({"bias": ones(8)}, "bias must be (O,) with O=9, got (8,)"),
        ({"layout": "diagonal"}, "unknown layout 'diagonal'; available: auto, row, column, transposed"),
        ({"implementation": "fast"}, "unknown implementation 'fast'; available: auto, reference"),
    ],
    "linear_cross_entropy": [
        ({"hidden": ones(2, 3, 4)}, "hidden must be (N, H), got (2, 3, 4)"),
        ({"weight": ones(5, 4)}, "weight must be (V, H) with H=3, got (5, 4)"),
        ({"bias": ones(4)}, "bias must be (V,) with V=5, got (4,)"),
        ({"targets": torch.zeros(5).long()}, "targets must be (N,) with N=6, got (5,)"),
        ({"targets": torch.zeros(6)}, "targets must be an int64 tensor, got torch.float32"),
        ({"targets": torch.full((6,), 5)}, "targets must be from 0 to 4, or -100, got 5"),
        ({"reduction": "median"}, "unknown reduction 'median'; available: mean, sum, none"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"label_smoothing": "x"}, "label_smoothing must be from 0 to 1, got 'x'"),
    ],
    "ssru": [
        ({"layers": GateWeights(ones(12, 3), ones(12))}, "layers must be * write (weights,)"),
        ({"layers": ()}, "layers is empty"),
        ({"layers.0": ones(4, 3)}, "layers[0] must be GateWeights, got a tensor"),
        ({"state.0": ones(3, 6)}, "state[0] must be (c,), got a tensor of shape (3, 6)"),
        ({"state": ()}, "state must be a tuple of (c,), one for each of 2 layers"),
        ({"state.0": (ones(3, 3),)}, "state[0] c must be (B, H) with B=3, H=6, got (3, 3)"),
        ({"lengths": torch.ones(2).long()}, "lengths must be (B,) with B=3"),
    ],
    "sru": [  # the highway of inputs of another width has a matrix of its own
        ({"layers.0": GateWeights(ones(18, 3), ones(24))}, "layers[0].input must be (4H, I) with 4H=24, I=3")
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *each) for name, rows in REFUSED.items() for each in rows]
)
def test_what_does_not_fit_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    op, arguments = PROBLEMS[name]
    for path, value in change.items():
        arguments = changed(arguments, path.split("."), value)
    pattern = re.escape(message).replace(r"\*", ".*").replace(r"\$", "$")
    with pytest.raises(ValueError, match=f"{op.__name__}: .*{pattern}"):
        op(**arguments)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("linear", "linear_cross_entropy")])
def test_what_fits_is_not_changed(name: str) -> None:
    op, arguments = PROBLEMS[name]
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, Tensor)}
    op(**arguments)
    assert all(arguments[key].equal(value) for key, value in before.items())


def test_gate_gradient_has_the_shape_of_the_gates() -> None:
    with pytest.raises(ValueError, match="lstm: gate_gradient must be"):
        econmt_ops.lstm(torch.ones(3, 4, 3), (LAYER,), gate_gradient=torch.ones(3, 3, 24))
    with pytest.raises(ValueError, match="lstm: gate_gradient requires one layer of LSTMWeights"):
        econmt_ops.lstm(torch.ones(3, 4, 3), (LAYER,), gate_gradient=torch.ones(4, 3, 24), reverse=True)


def test_values_on_a_device_are_not_looked_at() -> None:
    check = Shapes("some_op", B=1, T=4)
    check.bounded("lengths", torch.ones(1, device="meta").long(), 0)
    check.bounded("lengths", torch.ones(0).long(), 0)
