from __future__ import annotations

import pytest
import torch

import econmt_ops
from econmt_ops import AttentionalLSTMWeights, LSTMWeights
from econmt_ops.core.shapes import Shapes, check_dropout


def test_learns_sizes_and_holds_later_arguments_to_them() -> None:
    check = Shapes("some_op")
    check("a", torch.ones(2, 3), "B H")
    check("b", torch.ones(12, 3), "4H H")
    check("c", torch.ones(2, 5), "B T")
    assert check.sizes == {"B": 2, "H": 3, "4H": 12, "T": 5}
    with pytest.raises(
        ValueError, match=r"some_op: d must be \(B, T, 4H\) with B=2, T=5, 4H=12, got \(2, 5, 11\)"
    ):
        check("d", torch.ones(2, 5, 11), "B T 4H")
    with pytest.raises(ValueError, match=r"some_op: e must be \(H,\) with H=3, got \(1, 3\)"):
        check("e", torch.ones(1, 3), "H")


def test_a_misfit_teaches_nothing() -> None:
    check = Shapes("some_op")
    with pytest.raises(ValueError, match=r"a must be \(B, H\), got \(2, 3, 4\)"):
        check("a", torch.ones(2, 3, 4), "B H")
    assert check.sizes == {}


def test_types_and_devices() -> None:
    check = Shapes("some_op")
    check("a", torch.ones(2), "B")
    with pytest.raises(ValueError, match=r"b must be a floating point tensor, got torch\.int64"):
        check("b", torch.ones(2).long(), "B")
    with pytest.raises(ValueError, match="b is on meta, the arguments before it on cpu"):
        check("b", torch.ones(2, device="meta"), "B")
    check.indices("lengths", torch.ones(2, device="meta").long(), "B")
    with pytest.raises(ValueError, match=r"lengths must be an int64 tensor, got torch\.float32"):
        check.indices("lengths", torch.ones(2), "B")
    with pytest.raises(ValueError, match=r"x must have at least one position, got \(2, 0\)"):
        check.not_empty("x", torch.ones(2, 0))


def test_dropout() -> None:
    check_dropout("some_op", 0.0, None)
    check_dropout("some_op", 0.5, 0)
    with pytest.raises(ValueError, match=r"some_op: dropout 0\.5 needs dropout_seed, an int"):
        check_dropout("some_op", 0.5, None)
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="some_op: dropout must be at least 0 and less than 1"):
            check_dropout("some_op", wrong, 1)


LAYER = LSTMWeights(torch.ones(8, 3), torch.ones(8, 2), torch.ones(8))
X = torch.ones(1, 4, 3)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (LAYER, r"lstm: layers must be a tuple of LSTMWeights .*, got one LSTMWeights; write \(weights,\)"),
        (torch.ones(2, 3), r"layers must be a tuple .*, got a tensor of shape \(2, 3\)"),
        (None, "layers must be a tuple .*, got None"),
        ((LAYER, torch.ones(8)), r"layers\[1\] must be LSTMWeights or LowRankLSTMWeights, got a tensor"),
        ((tuple(LAYER),), r"layers\[0\] must be LSTMWeights .*, got a value of type tuple"),
        ((LSTMWeights(LAYER.input, LAYER.hidden, None),), r"layers\[0\]\.bias must be a tensor, got None"),
    ],
)
def test_layers_that_are_no_tuple_of_weights_are_told(layers: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        econmt_ops.lstm(X, layers)  # type: ignore[arg-type]


def test_what_is_no_weights_or_state_is_told() -> None:
    h = torch.zeros(1, 2)
    with pytest.raises(
        ValueError, match=r"lstm: state must be a tuple of \(h, c\), one a layer, got a tensor"
    ):
        econmt_ops.lstm(X, (LAYER,), state=(h, h))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bidirectional_lstm: backward must be LSTMWeights"):
        econmt_ops.bidirectional_lstm(X, LAYER, (LAYER,))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="attentional_lstm: weights must be AttentionalLSTMWeights, got a value"
    ):
        econmt_ops.attentional_lstm(X, X, X, LAYER, lengths=None)  # type: ignore[arg-type]
    weights = AttentionalLSTMWeights(LAYER, None, None, torch.ones(2, 5), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attentional_lstm: layers must be a tuple .* write \(weights,\)"):
        econmt_ops.attentional_lstm(X, X, X, weights, lengths=None)
    with pytest.raises(ValueError, match="lengths must be a tensor, got a value of type list"):
        econmt_ops.lstm(X, (LAYER,), lengths=[4])  # type: ignore[arg-type]
