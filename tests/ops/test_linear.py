from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops import linear
from tests.ops.helpers import Make, assert_same_function, each_implementation, scatter_strides

pytestmark = each_implementation("linear")
LAYOUT = pytest.mark.parametrize("layout", ["auto", "row", "column", "transposed", "packed"])
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


def arguments(
    make: Make, leading: tuple[int, ...], bias: bool, inputs: int = 7, outputs: int = 9
) -> dict[str, Any]:
    matrices = {"inputs": make(*leading, inputs), "weight": make(outputs, inputs)}
    return {**matrices, "bias": make(outputs) if bias else None}


def naive(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    products = [(inputs * row).sum(-1) + (0.0 if bias is None else bias[k]) for k, row in enumerate(weight)]
    return torch.stack(products, -1)


@LAYOUT
@BIAS
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 1, 4)], ids=str)
def test_equals_definition(
    layout: str, bias: bool, leading: tuple[int, ...], implementation: str, device: str
) -> None:
    function = partial(linear, layout=layout, implementation=implementation)
    assert_same_function(function, naive, arguments(Make(device), leading, bias))


@LAYOUT
@BIAS
@pytest.mark.parametrize("scattered", [False, True], ids=["rows", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precisions(
    layout: str, bias: bool, scattered: bool, dtype: torch.dtype, implementation: str, device: str
) -> None:
    """Wherever the values lie in memory."""

    def function(**tensors: Any) -> Tensor:
        laid = scatter_strides(tensors) if scattered else tensors
        outputs = linear(**laid, layout=layout, implementation=implementation)
        assert outputs.dtype == dtype
        return outputs

    def definition(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(inputs, weight, bias)

    assert_same_function(function, definition, arguments(Make(device), (3, 5), bias, 33, 17), dtype)


def test_the_layout_is_that_of_the_result(implementation: str, device: str) -> None:
    tensors = arguments(Make(device), (5,), True)
    assert linear(**tensors, layout="row", implementation=implementation).stride() == (9, 1)
    assert linear(**tensors, layout="column", implementation=implementation).stride() == (1, 5)
    assert linear(**tensors, layout="packed", implementation=implementation).stride() == (9, 1)
