from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from econmt_ops import LSTMWeights, dropout_mask, lstm
from econmt_ops.products.dropout import derive_seed
from tests.ops.helpers import (
    Make,
    assert_close,
    assert_gradcheck,
    assert_same_function,
    each_implementation,
    each_size,
    naive_lstm,
    padded_part,
    poisoned,
    scatter_strides,
    to,
    values_and_gradients,
)

pytestmark = each_implementation("lstm")
SIZES = each_size(
    {"B": 1, "T": 1, "I": 1, "H": 1, "L": 1},
    {"B": 2, "T": 5, "I": 3, "H": 7, "L": 1},
    {"B": 3, "T": 4, "I": 9, "H": 5, "L": 2},
    {"B": 4, "T": 6, "I": 8, "H": 8, "L": 3},
)
LENGTHS = pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
REVERSE = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def arguments(size: SimpleNamespace, make: Make, state: bool = True) -> dict[str, Any]:
    return {
        "inputs": make(size.B, size.T, size.I),
        "layers": make.layers(size.I, size.H, size.L),
        "state": make.state(size.B, size.H, size.L) if state else None,
    }


def ragged(size: SimpleNamespace) -> Tensor:
    """Lengths from T down to 1."""
    return torch.linspace(size.T, 1, size.B).round().long()


@SIZES
@LENGTHS
@REVERSE
def test_equals_definition(
    size: SimpleNamespace, full: bool, reverse: bool, implementation: str, device: str
) -> None:
    options = {"lengths": None if full else ragged(size), "reverse": reverse}

    def function(**tensors: Any) -> Any:
        return lstm(**tensors, **options, implementation=implementation)

    def definition(**tensors: Any) -> Any:
        return naive_lstm(**tensors, **options)

    assert_same_function(function, definition, arguments(size, Make(device)))


@LENGTHS
@REVERSE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precisions(dtype: torch.dtype, full: bool, reverse: bool, implementation: str, device: str) -> None:
    size = SimpleNamespace(B=3, T=6, I=4, H=9, L=2)
    options = {"lengths": None if full else torch.tensor([6, 1, 3]), "reverse": reverse}

    def function(**tensors: Any) -> Any:
        outputs, state = lstm(**tensors, **options, implementation=implementation)
        assert outputs.dtype == dtype
        assert [(h.dtype, c.dtype) for h, c in state] == [(dtype, torch.float32)] * 2
        return outputs, state

    def definition(**tensors: Any) -> Any:
        return naive_lstm(**tensors, **options)

    assert_same_function(function, definition, arguments(size, Make(device)), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cell_state_is_not_rounded_between_steps(
    dtype: torch.dtype, implementation: str, device: str
) -> None:
    # The forget gate is open and 0.001 is added in every step: in bfloat16 the sum would stop at 0.25.
    steps = 500
    weights = LSTMWeights(
        torch.zeros(4, 1, device=device, dtype=dtype),
        torch.zeros(4, 1, device=device, dtype=dtype),
        torch.tensor([50.0, 50.0, 0.001, 50.0], device=device, dtype=dtype),
    )
    inputs = torch.zeros(1, steps, 1, device=device, dtype=dtype)
    _, ((_, c),) = lstm(inputs, (weights,), implementation=implementation)
    assert float(c) == pytest.approx(steps * float(weights.bias[2].float().tanh()), rel=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
@REVERSE
def test_gradcheck(state: bool, reverse: bool, implementation: str, device: str) -> None:
    size = SimpleNamespace(B=2, T=3, I=2, H=2, L=2)
    options = {"lengths": torch.tensor([3, 1]), "reverse": reverse, "residual": True}

    def function(**tensors: Any) -> Any:
        return lstm(**tensors, **options, implementation=implementation)

    assert_gradcheck(function, arguments(size, Make(device), state))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
def test_equals_torch_on_packed_sequences(
    dtype: torch.dtype, layers: int, implementation: str, device: str
) -> None:
    torch.manual_seed(3)
    module = nn.LSTM(6, 10, layers, batch_first=True, device=device, dtype=dtype)
    weights = tuple(
        LSTMWeights(
            getattr(module, f"weight_ih_l{k}"),
            getattr(module, f"weight_hh_l{k}"),
            getattr(module, f"bias_ih_l{k}") + getattr(module, f"bias_hh_l{k}"),
        )
        for k in range(layers)
    )
    make = Make(device, dtype)
    inputs, lengths = make(5, 7, 6), torch.tensor([3, 7, 1, 7, 2])
    h, c = make(layers, 5, 10), make(layers, 5, 10)
    packed, (last_h, last_c) = module(pack_padded_sequence(inputs, lengths, True, False), (h, c))
    expected, _ = pad_packed_sequence(packed, True, total_length=7)
    outputs, state = lstm(
        inputs, weights, state=tuple(zip(h, c, strict=True)), lengths=lengths, implementation=implementation
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close([outputs], [expected], tolerance)
    assert_close([h for h, _ in state] + [c for _, c in state], [*last_h, *last_c], tolerance)


@REVERSE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_padding_has_no_influence(
    dtype: torch.dtype, reverse: bool, implementation: str, device: str
) -> None:
    size = SimpleNamespace(B=5, T=6, I=4, H=7, L=2)
    lengths = torch.tensor([6, 1, 3, 5, 0])
    clean = arguments(size, Make(device, dtype))

    def function(**tensors: Any) -> Any:
        return lstm(**tensors, lengths=lengths, reverse=reverse, residual=True, implementation=implementation)

    expected, expected_gradients = values_and_gradients(function, clean)
    assert padded_part(expected[0], lengths).eq(0).all()
    for poison in (float("nan"), float("-inf")):
        outputs, gradients = values_and_gradients(
            function, {**clean, "inputs": poisoned(clean["inputs"], lengths, poison)}
        )
        assert_close(outputs, expected, 0.0)
        assert_close(gradients, expected_gradients, 1e-6)
        assert padded_part(gradients[0], lengths).eq(0).all()


@REVERSE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_state_is_carried_past_the_end(
    dtype: torch.dtype, reverse: bool, implementation: str, device: str
) -> None:
    size = SimpleNamespace(B=3, T=6, I=4, H=7, L=2)
    tensors = arguments(size, Make(device, dtype))
    lengths = torch.tensor([4, 0, 2])
    _, state = lstm(**tensors, lengths=lengths, reverse=reverse, implementation=implementation)
    for row, length in enumerate(lengths.tolist()):
        one = {
            "inputs": tensors["inputs"][row : row + 1, : max(length, 1)],
            "layers": tensors["layers"],
            "state": tuple((h[row : row + 1], c[row : row + 1]) for h, c in tensors["state"]),
        }
        expected = one["state"]
        if length > 0:
            _, expected = lstm(**one, reverse=reverse, implementation=implementation)
        for (h, c), (expected_h, expected_c) in zip(state, expected, strict=True):
            tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
            assert_close([h[row : row + 1], c[row : row + 1]], [expected_h, expected_c], tolerance)


def test_two_halves_equal_the_whole(implementation: str, device: str) -> None:
    size = SimpleNamespace(B=2, T=7, I=3, H=5, L=2)
    tensors = arguments(size, Make(device))
    whole, last = lstm(**tensors, implementation=implementation)
    first, middle = lstm(
        tensors["inputs"][:, :4], tensors["layers"], state=tensors["state"], implementation=implementation
    )
    second, end = lstm(
        tensors["inputs"][:, 4:], tensors["layers"], state=middle, implementation=implementation
    )
    assert_close([torch.cat([first, second], 1)], [whole], 1e-13)
    assert_close([x for pair in end for x in pair], [x for pair in last for x in pair], 1e-13)


@REVERSE
@LENGTHS
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("variational", [False, True], ids=["each-step", "variational"])
def test_dropout_and_residual_equal_definition(
    reverse: bool, full: bool, residual: bool, variational: bool, implementation: str, device: str
) -> None:
    size = SimpleNamespace(B=3, T=5, I=4, H=6, L=3)
    options = {"lengths": None if full else torch.tensor([5, 1, 3]), "reverse": reverse, "residual": residual}
    shape = (3, 1 if variational else 5, 6)
    masks = [None] + [
        dropout_mask(shape, 0.4, derive_seed(11, k), torch.device(device), torch.float64).expand(3, 5, 6)
        for k in (1, 2)
    ]

    def function(**tensors: Any) -> Any:
        return lstm(
            **tensors,
            **options,
            dropout=0.4,
            dropout_seed=11,
            variational=variational,
            implementation=implementation,
        )

    def definition(**tensors: Any) -> Any:
        return naive_lstm(**tensors, **options, masks=masks)

    assert_same_function(function, definition, arguments(size, Make(device)))


def test_dropout_follows_its_seed(implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=4, I=3, H=8, L=2), Make(device))

    def outputs(seed: int) -> Tensor:
        return lstm(**tensors, dropout=0.5, dropout_seed=seed, implementation=implementation)[0]

    assert outputs(1).equal(outputs(1))
    assert not outputs(1).equal(outputs(2))


def test_one_layer_has_no_dropout(implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=4, I=3, H=8, L=1), Make(device))
    dropped = lstm(**tensors, dropout=0.9, dropout_seed=1, implementation=implementation)
    assert dropped[0].equal(lstm(**tensors, implementation=implementation)[0])


def test_without_gradients_gives_the_same(implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=3, T=4, I=3, H=8, L=2), Make(device, torch.float32))
    lengths = torch.tensor([4, 1, 2])
    with torch.no_grad():
        quick, _ = lstm(**tensors, lengths=lengths, implementation=implementation)
    tensors["inputs"].requires_grad_()
    slow, _ = lstm(**tensors, lengths=lengths, implementation=implementation)
    assert slow.requires_grad
    assert_close([quick], [slow], 1e-6)


def test_memory_layout_does_not_matter(implementation: str, device: str) -> None:
    size = SimpleNamespace(B=3, T=4, I=3, H=6, L=2)
    tensors = arguments(size, Make(device))
    scattered = scatter_strides(tensors)
    scattered["inputs"] = tensors["inputs"].transpose(0, 1).contiguous().transpose(0, 1)
    assert not scattered["inputs"].is_contiguous()

    def function(**tensors: Any) -> Any:
        return lstm(**tensors, lengths=torch.tensor([2, 4, 1]), implementation=implementation)

    expected, expected_gradients = values_and_gradients(function, tensors)
    outputs, gradients = values_and_gradients(function, scattered)
    assert_close(outputs, expected, 1e-13)
    assert_close(gradients, expected_gradients, 1e-13)


@pytest.mark.parametrize("wrong", [4, -1, 2**62])
def test_lengths_outside_of_the_positions_are_refused(implementation: str, device: str, wrong: int) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=3, I=2, H=4, L=1), Make(device))
    with pytest.raises(ValueError, match=rf"lstm: lengths must be from 0 to 3, got {wrong}$"):
        lstm(**tensors, lengths=torch.tensor([3, wrong]), implementation=implementation)


def shaped(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": shaped(2, 3)}, r"inputs must be \(B, T, I\), got \(2, 3\)"),
        ({"inputs": shaped(2, 0, 3)}, r"inputs must have at least one position, got \(2, 0, 3\)"),
        ({"inputs": shaped(2, 4, 5)}, r"layers\[0\]\.input must be \(4H, I\) with 4H=24, I=5, got \(24, 3\)"),
        ({"layers": ()}, r"layers is empty, at least one is needed"),
        ({"hidden": shaped(24, 5)}, r"layers\[1\]\.hidden must be \(4H, H\) with 4H=24, H=6, got \(24, 5\)"),
        ({"input": shaped(24, 3)}, r"layers\[1\]\.input must be \(4H, H\) with 4H=24, H=6, got \(24, 3\)"),
        ({"bias": shaped(6)}, r"layers\[1\]\.bias must be \(4H,\) with 4H=24, got \(6,\)"),
        (
            {"state": ((shaped(2, 6),) * 2,)},
            r"state must be a tuple of \(h, c\), one for each of 2 layers, got a tuple of 1",
        ),
        (
            {"state": ((shaped(2, 6), shaped(1, 6)),) * 2},
            r"state\[0\] c must be \(B, H\) with B=2, H=6, got \(1, 6\)",
        ),
        ({"lengths": torch.ones(3).long()}, r"lengths must be \(B,\) with B=2, got \(3,\)"),
        ({"lengths": torch.ones(2)}, r"lengths must be an int64 tensor, got torch\.float32"),
        ({"dropout": 0.5}, r"dropout 0\.5 needs dropout_seed, an int"),
        ({"dropout": 1.0, "dropout_seed": 1}, r"dropout must be at least 0 and less than 1, got 1\.0"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str, implementation: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=4, I=3, H=6, L=2), Make("cpu"))
    bottom, top = tensors["layers"]
    top_change = {name: change[name] for name in change if name in LSTMWeights._fields}
    tensors["layers"] = (bottom, top._replace(**top_change))
    change = {name: change[name] for name in change if name not in top_change}
    with pytest.raises(ValueError, match="lstm: " + message):
        lstm(**{**tensors, **change}, implementation=implementation)


def test_mixed_types_are_cast_to_that_of_the_inputs(implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=4, I=3, H=6, L=2), Make(device, torch.float32), state=False)
    mixed = {**tensors, "inputs": tensors["inputs"].bfloat16()}
    outputs, state = lstm(**mixed, implementation=implementation)
    expected, expected_state = lstm(**to(torch.bfloat16, tensors), implementation=implementation)
    assert outputs.dtype == torch.bfloat16
    assert outputs.equal(expected)
    assert state[1][0].equal(expected_state[1][0])
