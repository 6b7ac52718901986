from __future__ import annotations

from collections.abc import Callable

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
    message = r"lstm: state must be a tuple of \(h, c\), one for each of 1 layers, got a tuple of 2"
    with pytest.raises(ValueError, match=message):
        econmt_ops.lstm(X, (LAYER,), state=(h, h))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lstm: state\[0\] must be \(h, c\), got a tensor"):
        econmt_ops.lstm(X, (LAYER,), state=(h,))  # type: ignore[arg-type]
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


LENGTHS = torch.tensor([4])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: econmt_ops.bidirectional_lstm(X, LAYER, LAYER, lengths=LENGTHS + 1),
            "lengths must be from 0 to 4, got 5",
        ),
        (
            lambda: econmt_ops.additive_attention(X, X, X, torch.ones(3), lengths=LENGTHS - 5),
            "lengths must be from 0 to 4, got -1",
        ),
        (
            lambda: econmt_ops.lstm(X, (LAYER,), lengths=torch.ones(1, device="meta").long()),
            "lengths is on meta, the other arguments on cpu",
        ),
        (
            lambda: econmt_ops.lstm(econmt_ops.UniqueRows(X[0], LENGTHS.view(1, 1)), (LAYER,)),
            "inputs.places must be from 0 to 3, got 4",
        ),
        (
            lambda: econmt_ops.bidirectional_lstm(
                econmt_ops.UniqueRows(X[0], LENGTHS.view(1, 1) - 5), LAYER, LAYER
            ),
            "inputs.places must be from 0 to 3, got -1",
        ),
        (
            lambda: econmt_ops.lstm(X.to_sparse(), (LAYER,)),
            "inputs must be a dense tensor, got torch.sparse_coo",
        ),
        (lambda: econmt_ops.lstm(X.to(torch.float8_e4m3fn), (LAYER,)), "inputs must be float64, float32"),
        (
            lambda: econmt_ops.lstm(X, (LAYER._replace(hidden=5),)),
            "hidden must be a tensor, got a value of type int",
        ),
        (
            lambda: econmt_ops.lstm(X, (LAYER,), dropout="x"),
            "dropout must be at least 0 and less than 1, got x",
        ),
        (
            lambda: econmt_ops.lstm(X, (LAYER,), dropout=0.5, dropout_seed="x"),
            "dropout_seed must be an int of 64 bits",
        ),
        (
            lambda: econmt_ops.lstm(X, (LAYER,), dropout=0.5, dropout_seed=2**64),
            "dropout_seed must be an int of 64",
        ),
        (
            lambda: econmt_ops.linear([[1.0]], torch.ones(2, 3)),
            "inputs must be a tensor, got a value of type list",
        ),
        (
            lambda: econmt_ops.additive_attention(X, X, X, torch.ones(3), lengths=LENGTHS, layer_norm=(X,)),
            r"layer_norm must be \(gain, bias\), got a value of type tuple",
        ),
        (
            lambda: econmt_ops.linear_cross_entropy(
                X[0], torch.ones(5, 3), torch.zeros(4).long(), label_smoothing="x"
            ),
            "label_smoothing must be a finite number, got 'x'",
        ),
    ],
)
def test_values_and_kinds_that_fit_nothing(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_values_on_a_device_are_not_looked_at() -> None:
    check = Shapes("some_op", B=1, T=4)
    check.bounded("lengths", torch.ones(1, device="meta").long(), 0, 0)
    check.bounded("lengths", torch.ones(0).long(), 0, 0)
