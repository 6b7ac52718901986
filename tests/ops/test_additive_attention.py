from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import additive_attention
from tests.ops.helpers import (
    Make,
    assert_close,
    assert_gradcheck,
    assert_same_function,
    each_implementation,
    each_size,
    naive_additive_attention,
    padded_part,
    poisoned,
    scatter_strides,
    values_and_gradients,
)

pytestmark = each_implementation("additive_attention")
SIZES = each_size(
    {"B": 1, "T": 1, "S": 1, "A": 1, "E": 1},
    {"B": 2, "T": 3, "S": 5, "A": 7, "E": 4},
    {"B": 3, "T": 1, "S": 9, "A": 8, "E": 13},
    {"B": 2, "T": 6, "S": 2, "A": 17, "E": 3},
)


def arguments(size: SimpleNamespace, make: Make, layer_norm: bool = False) -> dict[str, Any]:
    return {
        "query": make(size.B, size.T, size.A),
        "keys": make(size.B, size.S, size.A),
        "values": make(size.B, size.S, size.E),
        "score_weight": make(size.A),
        "layer_norm": (make(size.A), make(size.A)) if layer_norm else None,
    }


def ragged(size: SimpleNamespace, device: str) -> Tensor:
    """Lengths from 1 to S, both ends among them if there are two rows."""
    return torch.linspace(1, size.S, size.B).round().long().to(device)


@SIZES
@pytest.mark.parametrize("layer_norm", [False, True], ids=["plain", "layer_norm"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
def test_equals_definition(
    size: SimpleNamespace, layer_norm: bool, full: bool, implementation: str, device: str
) -> None:
    lengths = None if full else ragged(size, device)

    def function(**tensors: Any) -> Any:
        return additive_attention(**tensors, lengths=lengths, implementation=implementation)

    def definition(**tensors: Any) -> Any:
        return naive_additive_attention(**tensors, lengths=lengths)

    assert_same_function(function, definition, arguments(size, Make(device), layer_norm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer_norm", [False, True], ids=["plain", "layer_norm"])
def test_precisions(dtype: torch.dtype, layer_norm: bool, implementation: str, device: str) -> None:
    size = SimpleNamespace(B=3, T=4, S=6, A=9, E=5)
    lengths = torch.tensor([6, 1, 4])

    def function(**tensors: Any) -> Any:
        context, weights = additive_attention(**tensors, lengths=lengths, implementation=implementation)
        assert context.dtype == weights.dtype == dtype
        return context, weights

    def definition(**tensors: Any) -> Any:
        return naive_additive_attention(**tensors, lengths=lengths)

    assert_same_function(function, definition, arguments(size, Make(device), layer_norm), dtype)


@pytest.mark.parametrize("layer_norm", [False, True], ids=["plain", "layer_norm"])
def test_gradcheck(layer_norm: bool, implementation: str, device: str) -> None:
    lengths = torch.tensor([3, 1, 0])

    def function(**tensors: Any) -> Any:
        return additive_attention(**tensors, lengths=lengths, implementation=implementation)

    size = SimpleNamespace(B=3, T=2, S=3, A=3, E=2)
    assert_gradcheck(function, arguments(size, Make(device), layer_norm))


@pytest.mark.parametrize("layer_norm", [False, True], ids=["plain", "layer_norm"])
def test_padding_has_no_influence(layer_norm: bool, implementation: str, device: str) -> None:
    size = SimpleNamespace(B=4, T=3, S=5, A=6, E=7)
    lengths = torch.tensor([5, 1, 3, 0])
    clean = arguments(size, Make(device), layer_norm)
    dirty = {**clean, "keys": poisoned(clean["keys"], lengths), "values": poisoned(clean["values"], lengths)}

    def function(**tensors: Any) -> Any:
        return additive_attention(**tensors, lengths=lengths, implementation=implementation)

    expected, expected_gradients = values_and_gradients(function, clean)
    for poison in (float("nan"), float("inf")):
        dirty["keys"] = poisoned(clean["keys"], lengths, poison)
        dirty["values"] = poisoned(clean["values"], lengths, poison)
        outputs, gradients = values_and_gradients(function, dirty)
        assert_close(outputs, expected, 1e-14)
        assert_close(gradients, expected_gradients, 1e-14)
        assert padded_part(gradients[1], lengths).eq(0).all()
        assert padded_part(gradients[2], lengths).eq(0).all()


def test_padded_weights_are_exactly_zero_and_the_rest_sums_to_one(implementation: str, device: str) -> None:
    size = SimpleNamespace(B=3, T=4, S=7, A=5, E=2)
    lengths = torch.tensor([7, 1, 4])
    tensors = arguments(size, Make(device, torch.float32))
    _, weights = additive_attention(**tensors, lengths=lengths, implementation=implementation)
    assert padded_part(weights.transpose(1, 2), lengths).eq(0).all()
    assert_close([weights.sum(2)], [torch.ones_like(weights.sum(2))], 1e-6)
    assert weights[1, :, 0].eq(1).all()


def test_empty_rows_give_zeros_and_no_gradient(implementation: str, device: str) -> None:
    size = SimpleNamespace(B=2, T=3, S=4, A=5, E=6)
    lengths = torch.tensor([0, 4])

    def function(**tensors: Any) -> Any:
        return additive_attention(**tensors, lengths=lengths, implementation=implementation)

    (context, weights), gradients = values_and_gradients(function, arguments(size, Make(device)))
    assert context[0].eq(0).all()
    assert weights[0].eq(0).all()
    assert weights[1].gt(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient[0].eq(0).all() for gradient in gradients[:3])


def test_large_scores_do_not_overflow(implementation: str, device: str) -> None:
    make = Make(device, torch.float32)
    query, keys, values = make(1, 1, 4), make(1, 3, 4), make(1, 3, 2)
    weight = torch.full((4,), 1e4, device=device)
    context, weights = additive_attention(
        query, keys, values, weight, lengths=None, implementation=implementation
    )
    best = torch.tanh(query[0, 0] + keys[0]).sum(1).argmax()
    assert_close([context[0, 0]], [values[0, best]], 1e-6)
    assert_close([weights.sum()], [torch.tensor(1.0)], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_accumulate_in_float32(dtype: torch.dtype, implementation: str, device: str) -> None:
    # One score is 1024 times 1/256, the other 0; a sum in bfloat16 would stop at 1.
    keys = torch.tensor([50.0, 0.0], dtype=dtype, device=device).view(1, 2, 1).expand(1, 2, 1024)
    weight = torch.full((1024,), 2.0**-8, dtype=dtype, device=device)
    query = torch.zeros(1, 1, 1024, dtype=dtype, device=device)
    _, weights = additive_attention(query, keys, keys, weight, lengths=None, implementation=implementation)
    assert_close([weights[0, 0]], [torch.tensor([4.0, 0.0], device=device).softmax(0)], 4e-3)


def test_memory_layout_does_not_matter(implementation: str, device: str) -> None:
    size = SimpleNamespace(B=3, T=4, S=5, A=6, E=7)
    lengths = torch.tensor([2, 5, 1])
    tensors = arguments(size, Make(device), layer_norm=True)
    scattered = scatter_strides(tensors)
    assert not scattered["keys"].is_contiguous()

    def function(**tensors: Any) -> Any:
        return additive_attention(**tensors, lengths=lengths, implementation=implementation)

    expected, expected_gradients = values_and_gradients(function, tensors)
    outputs, gradients = values_and_gradients(function, scattered)
    assert_close(outputs, expected, 1e-13)
    assert_close(gradients, expected_gradients, 1e-13)


def test_arguments_are_not_changed(implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=1, T=1, S=3, A=4, E=2), Make(device))
    before = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    additive_attention(**tensors, lengths=torch.tensor([2]), implementation=implementation)
    assert all(tensors[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("query", (2, 7), r"query must be \(B, T, A\), got \(2, 7\)"),
        ("keys", (3, 5, 7), r"keys must be \(B, S, A\) with B=2, A=7, got \(3, 5, 7\)"),
        ("keys", (2, 5, 6), r"keys must be \(B, S, A\) with B=2, A=7, got \(2, 5, 6\)"),
        ("values", (2, 4, 4), r"values must be \(B, S, E\) with B=2, S=5, got \(2, 4, 4\)"),
        ("score_weight", (7, 1), r"score_weight must be \(A,\) with A=7, got \(7, 1\)"),
        ("lengths", (3,), r"lengths must be \(B,\) with B=2, got \(3,\)"),
    ],
)
def test_wrong_shapes(name: str, shape: tuple[int, ...], message: str, implementation: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=3, S=5, A=7, E=4), Make("cpu"))
    tensors["lengths"] = torch.tensor([5, 5])
    tensors[name] = torch.ones(shape, dtype=tensors[name].dtype)
    with pytest.raises(ValueError, match="additive_attention: " + message):
        additive_attention(**tensors, implementation=implementation)


def test_wrong_layer_norm_types_and_emptiness(implementation: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=3, S=5, A=7, E=4), Make("cpu"))
    with pytest.raises(ValueError, match=r"layer_norm bias must be \(A,\) with A=7, got \(6,\)"):
        additive_attention(
            **{**tensors, "layer_norm": (torch.ones(7), torch.ones(6))},
            lengths=None,
            implementation=implementation,
        )
    with pytest.raises(ValueError, match=r"lengths must be an int64 tensor, got torch\.int32"):
        additive_attention(**tensors, lengths=torch.ones(2, dtype=torch.int32), implementation=implementation)
    with pytest.raises(ValueError, match=r"query must be a floating point tensor, got torch\.int64"):
        additive_attention(
            **{**tensors, "query": torch.ones(2, 3, 7, dtype=torch.int64)},
            lengths=None,
            implementation=implementation,
        )
    empty = {**tensors, "keys": torch.ones(2, 0, 7), "values": torch.ones(2, 0, 4)}
    with pytest.raises(ValueError, match=r"keys must have at least one position, got \(2, 0, 7\)"):
        additive_attention(**empty, lengths=None, implementation=implementation)
