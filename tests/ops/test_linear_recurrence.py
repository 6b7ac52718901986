from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import linear_recurrence
from tests.ops.helpers import (
    Make,
    assert_close,
    assert_gradcheck,
    assert_same_function,
    each_implementation,
    each_size,
    scatter_strides,
    values_and_gradients,
)

pytestmark = each_implementation("linear_recurrence")
SIZES = each_size({"B": 1, "T": 1, "H": 1}, {"B": 2, "T": 5, "H": 7}, {"B": 3, "T": 33, "H": 2})
REVERSE = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
INITIAL = pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])


def arguments(size: SimpleNamespace, make: Make, initial: bool) -> dict[str, Any]:
    return {
        "decay": make(size.B, size.T, size.H).sigmoid(),
        "inputs": make(size.B, size.T, size.H),
        "initial": make(size.B, size.H) if initial else None,
    }


def naive(decay: Tensor, inputs: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """The sum over all earlier inputs, each times the decays since: no recurrence."""
    steps = inputs.shape[1]
    order = list(range(steps))[:: -1 if reverse else 1]
    outputs: list[Tensor] = [inputs[:, 0]] * steps
    for now in range(steps):
        total = torch.zeros_like(inputs[:, 0])
        for then in range(now + 1):
            since = decay[:, order[then + 1 : now + 1]].prod(1)
            total = total + since * inputs[:, order[then]]
        if initial is not None:
            total = total + decay[:, order[: now + 1]].prod(1) * initial
        outputs[order[now]] = total
    return torch.stack(outputs, 1)


@SIZES
@REVERSE
@INITIAL
def test_equals_definition(
    size: SimpleNamespace, reverse: bool, initial: bool, implementation: str, device: str
) -> None:
    def function(**tensors: Any) -> Tensor:
        return linear_recurrence(**tensors, reverse=reverse, implementation=implementation)

    def definition(**tensors: Any) -> Tensor:
        return naive(**tensors, reverse=reverse)

    assert_same_function(function, definition, arguments(size, Make(device), initial))


@REVERSE
@INITIAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precisions(
    reverse: bool, initial: bool, dtype: torch.dtype, implementation: str, device: str
) -> None:
    def function(**tensors: Any) -> Tensor:
        outputs = linear_recurrence(**tensors, reverse=reverse, implementation=implementation)
        assert outputs.dtype == dtype
        return outputs

    def definition(**tensors: Any) -> Tensor:
        return naive(**tensors, reverse=reverse)

    size = SimpleNamespace(B=2, T=9, H=5)
    assert_same_function(function, definition, arguments(size, Make(device), initial), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accumulates_in_float32(dtype: torch.dtype, implementation: str, device: str) -> None:
    # In bfloat16 a running sum of 1/512 stops at 1/2, in float16 one of 2^-12 at 1/2.
    step = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
    count = int(1 / step)
    inputs = torch.full((1, count, 1), step, dtype=dtype, device=device)
    outputs = linear_recurrence(torch.ones_like(inputs), inputs, implementation=implementation)
    assert float(outputs[0, -1, 0]) == 1.0


@REVERSE
@INITIAL
def test_gradcheck(reverse: bool, initial: bool, implementation: str, device: str) -> None:
    def function(**tensors: Any) -> Tensor:
        return linear_recurrence(**tensors, reverse=reverse, implementation=implementation)

    assert_gradcheck(function, arguments(SimpleNamespace(B=2, T=4, H=2), Make(device), initial))


def test_zero_decay_forgets_everything(implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=5, H=3), Make(device), True)
    tensors["decay"] = torch.zeros_like(tensors["decay"])
    assert linear_recurrence(**tensors, implementation=implementation).equal(tensors["inputs"])


@REVERSE
def test_memory_layout_does_not_matter(reverse: bool, implementation: str, device: str) -> None:
    tensors = arguments(SimpleNamespace(B=3, T=4, H=5), Make(device), True)

    def function(**tensors: Any) -> Tensor:
        return linear_recurrence(**tensors, reverse=reverse, implementation=implementation)

    expected, expected_gradients = values_and_gradients(function, tensors)
    outputs, gradients = values_and_gradients(function, scatter_strides(tensors))
    assert_close(outputs, expected, 1e-14)
    assert_close(gradients, expected_gradients, 1e-14)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decay", (2, 5), r"decay must be \(B, T, H\), got \(2, 5\)"),
        ("inputs", (2, 4, 7), r"inputs must be \(B, T, H\) with B=2, T=5, H=7, got \(2, 4, 7\)"),
        ("initial", (7, 2), r"initial must be \(B, H\) with B=2, H=7, got \(7, 2\)"),
    ],
)
def test_wrong_shapes(name: str, shape: tuple[int, ...], message: str, implementation: str) -> None:
    tensors = arguments(SimpleNamespace(B=2, T=5, H=7), Make("cpu"), True)
    tensors[name] = torch.ones(shape)
    with pytest.raises(ValueError, match="linear_recurrence: " + message):
        linear_recurrence(**tensors, implementation=implementation)


def test_empty(implementation: str) -> None:
    with pytest.raises(ValueError, match=r"inputs must have at least one position, got \(2, 0, 7\)"):
        linear_recurrence(torch.ones(2, 0, 7), torch.ones(2, 0, 7), implementation=implementation)
