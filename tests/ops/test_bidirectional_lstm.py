from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from econmt_ops import LSTMWeights, bidirectional_lstm, lstm
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
    values_and_gradients,
)

pytestmark = each_implementation("bidirectional_lstm")
SIZES = each_size(
    {"B": 1, "T": 1, "I": 1, "H": 1},
    {"B": 2, "T": 5, "I": 3, "H": 7},
    {"B": 5, "T": 4, "I": 8, "H": 8},
)
LENGTHS = pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])


def arguments(size: SimpleNamespace, make: Make) -> dict[str, Any]:
    return {
        "inputs": make(size.B, size.T, size.I),
        "forward": make.layer(size.I, size.H),
        "backward": make.layer(size.I, size.H),
    }


def definition(inputs: Tensor, forward: LSTMWeights, backward: LSTMWeights, lengths: Tensor | None) -> Any:
    left, (left_state,) = naive_lstm(inputs, (forward,), lengths=lengths)
    right, (right_state,) = naive_lstm(inputs, (backward,), lengths=lengths, reverse=True)
    return torch.cat([left, right], 2), (left_state, right_state)


def ragged(size: SimpleNamespace) -> Tensor:
    return torch.linspace(1, size.T, size.B).round().long()


@SIZES
@LENGTHS
def test_equals_definition(size: SimpleNamespace, full: bool, implementation: str, device: str) -> None:
    lengths = None if full else ragged(size)

    def function(**tensors: Any) -> Any:
        return bidirectional_lstm(**tensors, lengths=lengths, implementation=implementation)

    assert_same_function(
        function, lambda **tensors: definition(**tensors, lengths=lengths), arguments(size, Make(device))
    )


@LENGTHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precisions(dtype: torch.dtype, full: bool, implementation: str, device: str) -> None:
    lengths = None if full else torch.tensor([6, 1, 3])

    def function(**tensors: Any) -> Any:
        outputs, states = bidirectional_lstm(**tensors, lengths=lengths, implementation=implementation)
        assert outputs.dtype == dtype
        assert [(h.dtype, c.dtype) for h, c in states] == [(dtype, torch.float32)] * 2
        return outputs, states

    size = SimpleNamespace(B=3, T=6, I=4, H=9)
    make = Make(device)
    assert_same_function(
        function, lambda **tensors: definition(**tensors, lengths=lengths), arguments(size, make), dtype
    )


def test_gradcheck(implementation: str, device: str) -> None:
    def function(**tensors: Any) -> Any:
        return bidirectional_lstm(**tensors, lengths=torch.tensor([1, 3]), implementation=implementation)

    assert_gradcheck(function, arguments(SimpleNamespace(B=2, T=3, I=2, H=2), Make(device)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_torch_on_packed_sequences(dtype: torch.dtype, implementation: str, device: str) -> None:
    torch.manual_seed(3)
    module = nn.LSTM(6, 10, batch_first=True, bidirectional=True, device=device, dtype=dtype)
    forward, backward = (
        LSTMWeights(
            getattr(module, "weight_ih" + suffix),
            getattr(module, "weight_hh" + suffix),
            getattr(module, "bias_ih" + suffix) + getattr(module, "bias_hh" + suffix),
        )
        for suffix in ("_l0", "_l0_reverse")
    )
    inputs, lengths = Make(device, dtype)(5, 7, 6), torch.tensor([3, 7, 1, 7, 2])
    packed, (last_h, last_c) = module(pack_padded_sequence(inputs, lengths, True, False))
    expected, _ = pad_packed_sequence(packed, True, total_length=7)
    outputs, states = bidirectional_lstm(
        inputs, forward, backward, lengths=lengths, implementation=implementation
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close([outputs], [expected], tolerance)
    assert_close([h for h, _ in states] + [c for _, c in states], [*last_h, *last_c], tolerance)


@LENGTHS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_two_one_way_stacks(dtype: torch.dtype, full: bool, implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=4, T=5, I=6, H=7), Make(device, dtype))
    lengths = None if full else torch.tensor([5, 0, 1, 3])
    outputs, states = bidirectional_lstm(**tensors, lengths=lengths, implementation=implementation)
    left, (left_state,) = lstm(tensors["inputs"], (tensors["forward"],), lengths=lengths)
    right, (right_state,) = lstm(tensors["inputs"], (tensors["backward"],), lengths=lengths, reverse=True)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert_close([outputs], [torch.cat([left, right], 2)], tolerance)
    assert_close([*states[0], *states[1]], [*left_state, *right_state], tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_padding_has_no_influence(dtype: torch.dtype, implementation: str, device: str) -> None:
    lengths = torch.tensor([6, 1, 3, 5, 0])
    clean = arguments(SimpleNamespace(B=5, T=6, I=4, H=7), Make(device, dtype))

    def function(**tensors: Any) -> Any:
        return bidirectional_lstm(**tensors, lengths=lengths, implementation=implementation)

    expected, expected_gradients = values_and_gradients(function, clean)
    outputs, gradients = values_and_gradients(
        function, {**clean, "inputs": poisoned(clean["inputs"], lengths)}
    )
    assert_close(outputs, expected, 0.0)
    assert_close(gradients, expected_gradients, 1e-6)
    assert padded_part(outputs[0], lengths).eq(0).all()
    assert padded_part(gradients[0], lengths).eq(0).all()


def test_memory_layout_does_not_matter(implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=3, T=4, I=3, H=6), Make(device))

    def function(**tensors: Any) -> Any:
        return bidirectional_lstm(**tensors, lengths=torch.tensor([2, 4, 1]), implementation=implementation)

    expected, expected_gradients = values_and_gradients(function, tensors)
    outputs, gradients = values_and_gradients(function, scatter_strides(tensors))
    assert_close(outputs, expected, 1e-13)
    assert_close(gradients, expected_gradients, 1e-13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": (2, 3)}, r"inputs must be \(B, T, I\), got \(2, 3\)"),
        ({"inputs": (2, 0, 3)}, r"inputs must have at least one position, got \(2, 0, 3\)"),
        ({"inputs": (2, 4, 5)}, r"forward\.input must be \(4H, I\) with 4H=24, I=5, got \(24, 3\)"),
        ({"hidden": (24, 5)}, r"backward\.hidden must be \(4H, H\) with 4H=24, H=6, got \(24, 5\)"),
        ({"bias": (20,)}, r"backward\.bias must be \(4H,\) with 4H=24, got \(20,\)"),
    ],
)
def test_wrong_shapes(change: dict[str, tuple[int, ...]], message: str, implementation: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=4, I=3, H=6), Make("cpu"))
    for name, shape in change.items():
        if name == "inputs":
            tensors["inputs"] = torch.ones(shape)
        else:
            tensors["backward"] = tensors["backward"]._replace(**{name: torch.ones(shape)})
    with pytest.raises(ValueError, match="bidirectional_lstm: " + message):
        bidirectional_lstm(**tensors, implementation=implementation)


def test_wrong_lengths(implementation: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=4, I=3, H=6), Make("cpu"))
    with pytest.raises(ValueError, match=r"bidirectional_lstm: lengths must be \(B,\) with B=2, got \(3,\)"):
        bidirectional_lstm(**tensors, lengths=torch.ones(3).long(), implementation=implementation)
