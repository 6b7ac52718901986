from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights, attentional_lstm, dropout_mask
from econmt_ops.products.dropout import derive_seed
from tests.ops.helpers import (
    Make,
    assert_close,
    assert_gradcheck,
    assert_same_function,
    each_implementation,
    each_size,
    naive_attentional_lstm,
    padded_part,
    poisoned,
    scatter_strides,
    to,
    values_and_gradients,
)

pytestmark = each_implementation("attentional_lstm")
SIZES = each_size(
    {"B": 1, "T": 1, "S": 1, "I": 1, "H": 1, "A": 1, "E": 1, "L": 1},
    {"B": 2, "T": 3, "S": 4, "I": 5, "H": 7, "A": 6, "E": 3, "L": 1},
    {"B": 3, "T": 4, "S": 5, "I": 2, "H": 4, "A": 9, "E": 8, "L": 3},
)
SIZE = SimpleNamespace(B=3, T=4, S=5, I=3, H=6, A=7, E=4, L=2)
FEEDING = pytest.mark.parametrize("feeding", [True, False], ids=["fed", "not-fed"])
ATTENTION = pytest.mark.parametrize("attention", ["additive", "layer_norm", "general", "dot"])


def arguments(
    size: SimpleNamespace, make: Make, feeding: bool = True, attention: str = "additive", state: bool = True
) -> dict[str, Any]:
    """All tensor arguments; `general` is dot attention of a projected query, `dot` of h itself."""
    attention_size = size.H if attention == "dot" else size.A
    weights = AttentionalLSTMWeights(
        layers=make.layers(size.I + size.H if feeding else size.I, size.H, size.L),
        query=None if attention == "dot" else make(size.A, size.H),
        score=make(size.A) if attention in ("additive", "layer_norm") else None,
        combine=make(size.H, size.H + size.E, scale=0.5),
        combine_bias=make(size.H) if attention in ("additive", "general") else None,
    )
    return {
        "inputs": make(size.B, size.T, size.I),
        "keys": make(size.B, size.S, attention_size),
        "values": make(size.B, size.S, size.E),
        "weights": weights,
        "state": AttentionalLSTMState(make.state(size.B, size.H, size.L), make(size.B, size.H, scale=0.5))
        if state
        else None,
        "layer_norm": (make(size.A), make(size.A)) if attention == "layer_norm" else None,
    }


def ragged(size: SimpleNamespace) -> Tensor:
    """Lengths from S down to 1."""
    return torch.linspace(size.S, 1, size.B).round().long()


@SIZES
@FEEDING
@ATTENTION
def test_equals_definition(
    size: SimpleNamespace, feeding: bool, attention: str, implementation: str, device: str
) -> None:
    options = {
        "lengths": ragged(size),
        "input_feeding": feeding,
        "scale": 0.3 if attention in ("dot", "general") else 1.0,
    }

    def function(**tensors: Any) -> Any:
        return attentional_lstm(**tensors, **options, implementation=implementation)

    def definition(**tensors: Any) -> Any:
        return naive_attentional_lstm(**tensors, **options)

    assert_same_function(function, definition, arguments(size, Make(device), feeding, attention))


@FEEDING
def test_equals_definition_without_lengths_and_state(feeding: bool, implementation: str, device: str) -> None:
    def function(**tensors: Any) -> Any:
        return attentional_lstm(**tensors, lengths=None, input_feeding=feeding, implementation=implementation)

    def definition(**tensors: Any) -> Any:
        return naive_attentional_lstm(**tensors, input_feeding=feeding)

    assert_same_function(function, definition, arguments(SIZE, Make(device), feeding, state=False))


@FEEDING
@ATTENTION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precisions(
    dtype: torch.dtype, feeding: bool, attention: str, implementation: str, device: str
) -> None:
    options = {"lengths": torch.tensor([5, 1, 3]), "input_feeding": feeding}

    def function(**tensors: Any) -> Any:
        outputs, weights, state = attentional_lstm(**tensors, **options, implementation=implementation)
        assert outputs.dtype == weights.dtype == state.output.dtype == dtype
        assert [(h.dtype, c.dtype) for h, c in state.layers] == [(dtype, torch.float32)] * 2
        return outputs, weights, state

    def definition(**tensors: Any) -> Any:
        return naive_attentional_lstm(**tensors, **options)

    assert_same_function(function, definition, arguments(SIZE, Make(device), feeding, attention), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@FEEDING
def test_cell_state_is_not_rounded_between_steps(
    dtype: torch.dtype, feeding: bool, implementation: str, device: str
) -> None:
    # The forget gate is open and 0.001 is added in every step: in bfloat16 the sum would stop at 0.25.
    size = SimpleNamespace(B=1, T=500, S=1, I=1, H=1, A=1, E=1, L=1)
    tensors = to(dtype, arguments(size, Make(device), feeding, state=False))
    (layer,) = tensors["weights"].layers
    layer = layer._replace(
        input=torch.zeros_like(layer.input),
        hidden=torch.zeros_like(layer.hidden),
        bias=torch.tensor([50.0, 50.0, 0.001, 50.0], device=device, dtype=dtype),
    )
    tensors["weights"] = tensors["weights"]._replace(layers=(layer,))
    _, _, state = attentional_lstm(
        **tensors, lengths=None, input_feeding=feeding, implementation=implementation
    )
    expected = 500 * float(layer.bias[2].float().tanh())
    assert float(state.layers[0][1]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.sampled(4)
@FEEDING
@pytest.mark.parametrize("attention", ["layer_norm", "general"])
def test_gradcheck(feeding: bool, attention: str, implementation: str, device: str) -> None:
    size = SimpleNamespace(B=2, T=2, S=2, I=2, H=2, A=2, E=2, L=2)

    def function(**tensors: Any) -> Any:
        return attentional_lstm(
            **tensors,
            lengths=torch.tensor([2, 1]),
            input_feeding=feeding,
            residual=True,
            implementation=implementation,
        )

    assert_gradcheck(function, arguments(size, Make(device), feeding, attention))


@FEEDING
@ATTENTION
def test_steps_one_at_a_time_equal_one_call(
    feeding: bool, attention: str, implementation: str, device: str
) -> None:
    tensors = arguments(SIZE, Make(device), feeding, attention)
    options: dict[str, Any] = {
        "lengths": torch.tensor([2, 5, 1]),
        "input_feeding": feeding,
        "residual": True,
        "dropout": 0.3,
        "dropout_seed": 5,
        "variational": True,
        "implementation": implementation,
    }

    def stepwise(inputs: Tensor, state: AttentionalLSTMState | None, **others: Any) -> Any:
        outputs, attentions = [], []
        for t in range(inputs.shape[1]):
            output, weights, state = attentional_lstm(inputs[:, t : t + 1], state=state, **others, **options)
            outputs.append(output)
            attentions.append(weights)
        return torch.cat(outputs, 1), torch.cat(attentions, 1), state

    expected, expected_gradients = values_and_gradients(
        lambda **given: attentional_lstm(**given, **options), tensors
    )
    results, gradients = values_and_gradients(stepwise, tensors)
    assert_close(results, expected, 1e-12)
    assert_close(gradients, expected_gradients, 1e-12)


def test_state_output_is_the_last_output(implementation: str, device: str) -> None:
    tensors = arguments(SIZE, Make(device))
    outputs, _, state = attentional_lstm(**tensors, lengths=None, implementation=implementation)
    assert state.output.equal(outputs[:, -1])
    assert len(state.layers) == SIZE.L


@FEEDING
@ATTENTION
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_padding_has_no_influence(
    dtype: torch.dtype, feeding: bool, attention: str, implementation: str, device: str
) -> None:
    lengths = torch.tensor([5, 1, 0])
    clean = arguments(SIZE, Make(device, dtype), feeding, attention)
    dirty = {**clean, "keys": poisoned(clean["keys"], lengths), "values": poisoned(clean["values"], lengths)}

    def function(**tensors: Any) -> Any:
        return attentional_lstm(
            **tensors, lengths=lengths, input_feeding=feeding, implementation=implementation
        )

    expected, expected_gradients = values_and_gradients(function, clean)
    outputs, gradients = values_and_gradients(function, dirty)
    assert all(x.isfinite().all() for x in outputs)
    assert_close(outputs, expected, 0.0)
    assert_close(gradients, expected_gradients, 1e-6)
    assert padded_part(outputs[1].transpose(1, 2), lengths).eq(0).all()
    assert padded_part(gradients[1], lengths).eq(0).all()
    assert padded_part(gradients[2], lengths).eq(0).all()


@ATTENTION
@pytest.mark.parametrize("steps", [1, 3])
def test_finite_padding_need_not_be_cleaned(
    steps: int, attention: str, implementation: str, device: str
) -> None:
    size = SimpleNamespace(**{**vars(SIZE), "T": steps})
    lengths = torch.tensor([5, 1, 0])

    def function(clean: bool, **tensors: Any) -> Any:
        return attentional_lstm(**tensors, lengths=lengths, clean=clean, implementation=implementation)

    tensors = arguments(size, Make(device, torch.float64), True, attention)
    expected, expected_gradients = values_and_gradients(partial(function, False), tensors)
    outputs, gradients = values_and_gradients(partial(function, True), tensors)
    assert_close(outputs, expected, 0.0)
    assert_close(gradients, expected_gradients, 1e-12)
    if implementation == "reference":
        broken = {**tensors, "values": poisoned(tensors["values"], lengths)}
        assert not function(True, **broken)[0].isfinite().all()  # the promise is relied on


@FEEDING
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("variational", [False, True], ids=["each-step", "variational"])
def test_dropout_and_residual_equal_definition(
    feeding: bool, residual: bool, variational: bool, implementation: str, device: str
) -> None:
    size = SimpleNamespace(B=2, T=4, S=3, I=3, H=5, A=4, E=4, L=3)
    shape = (2, 1 if variational else 4, 5)
    masks = [None] + [
        dropout_mask(shape, 0.4, derive_seed(11, k), torch.device(device), torch.float64).expand(2, 4, 5)
        for k in (1, 2)
    ]
    options = {"lengths": torch.tensor([3, 2]), "input_feeding": feeding, "residual": residual}

    def function(**tensors: Any) -> Any:
        return attentional_lstm(
            **tensors,
            **options,
            dropout=0.4,
            dropout_seed=11,
            variational=variational,
            implementation=implementation,
        )

    def definition(**tensors: Any) -> Any:
        return naive_attentional_lstm(**tensors, **options, masks=masks)

    assert_same_function(function, definition, arguments(size, Make(device), feeding))


@FEEDING
def test_dropout_follows_its_seed(feeding: bool, implementation: str, device: str) -> None:
    tensors = arguments(SIZE, Make(device), feeding)

    def outputs(seed: int) -> Tensor:
        return attentional_lstm(
            **tensors,
            lengths=None,
            input_feeding=feeding,
            dropout=0.5,
            dropout_seed=seed,
            implementation=implementation,
        )[0]

    assert outputs(1).equal(outputs(1))
    assert not outputs(1).equal(outputs(2))


@FEEDING
def test_memory_layout_does_not_matter(feeding: bool, implementation: str, device: str) -> None:
    tensors = arguments(SIZE, Make(device), feeding, "layer_norm")

    def function(**tensors: Any) -> Any:
        return attentional_lstm(
            **tensors, lengths=torch.tensor([2, 5, 1]), input_feeding=feeding, implementation=implementation
        )

    expected, expected_gradients = values_and_gradients(function, tensors)
    outputs, gradients = values_and_gradients(function, scatter_strides(tensors))
    assert_close(outputs, expected, 1e-13)
    assert_close(gradients, expected_gradients, 1e-13)


def shaped(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": shaped(2, 3)}, r"inputs must be \(B, T, I\), got \(2, 3\)"),
        ({"inputs": shaped(2, 0, 3)}, r"inputs must have at least one position, got \(2, 0, 3\)"),
        (
            {"inputs": shaped(3, 4, 2)},
            r"layers\[0\]\.input must be \(4H, I\+H\) with 4H=24, I\+H=8, got \(24, 9\)",
        ),
        ({"input_feeding": False}, r"layers\[0\]\.input must be \(4H, I\) with 4H=24, I=3, got \(24, 9\)"),
        ({"layers": ()}, r"layers is empty, at least one is needed"),
        ({"query": shaped(7, 5)}, r"weights\.query must be \(A, H\) with H=6, got \(7, 5\)"),
        ({"query": None}, r"keys must be \(B, S, A\) with B=3, A=6, got \(3, 5, 7\)"),
        ({"keys": shaped(3, 5, 8)}, r"keys must be \(B, S, A\) with B=3, A=7, got \(3, 5, 8\)"),
        ({"values": shaped(3, 6, 4)}, r"values must be \(B, S, E\) with B=3, S=5, got \(3, 6, 4\)"),
        ({"score": shaped(6)}, r"weights\.score must be \(A,\) with A=7, got \(6,\)"),
        (
            {"combine": shaped(6, 11)},
            r"weights\.combine must be \(H, H\+E\) with H=6, H\+E=10, got \(6, 11\)",
        ),
        ({"combine_bias": shaped(4)}, r"weights\.combine_bias must be \(H,\) with H=6, got \(4,\)"),
        ({"lengths": torch.ones(2).long()}, r"lengths must be \(B,\) with B=3, got \(2,\)"),
        ({"layer_norm": (shaped(6), shaped(7))}, r"layer_norm gain must be \(A,\) with A=7, got \(6,\)"),
        ({"scale": 0.5}, r"scale applies to dot attention only; with weights\.score it must be 1, got 0\.5"),
        ({"score": None, "layer_norm": (shaped(7), shaped(7))}, r"layer_norm requires additive attention"),
        ({"dropout": 0.1}, r"dropout 0\.1 needs dropout_seed, an int"),
        (
            {"state": AttentionalLSTMState(((shaped(3, 6),) * 2,) * 2, shaped(3, 5))},
            r"state\.output must be \(B, H\) with B=3, H=6, got \(3, 5\)",
        ),
        (
            {"state": AttentionalLSTMState(((shaped(3, 6),) * 2,), shaped(3, 6))},
            r"state must be a tuple of \(h, c\), one for each of 2 layers, got a tuple of 1",
        ),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str, implementation: str) -> None:
    tensors = {**arguments(SIZE, Make("cpu")), "lengths": None}
    in_weights = {name: change[name] for name in change if name in AttentionalLSTMWeights._fields}
    tensors["weights"] = tensors["weights"]._replace(**in_weights)
    tensors.update({name: change[name] for name in change if name not in in_weights})
    with pytest.raises(ValueError, match="attentional_lstm: " + message):
        attentional_lstm(**tensors, implementation=implementation)
