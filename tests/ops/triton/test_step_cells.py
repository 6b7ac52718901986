"""The kernels of a step of a GRU and of a layer-normalised LSTM against the definitions of the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.triton import cells
from econmt_ops.layers import stepped
from tests.ops.helpers import Make, assert_same_function, padded_part, poisoned, scatter_strides
from tests.ops.test_cells import CASES, arguments

each_step = pytest.mark.parametrize(
    "name", ["gru", "lnlstm", pytest.param("lnlstm-per-gate", marks=pytest.mark.thorough)]
)


def function(name: str, implementation: str = "triton", **options: Any) -> Any:
    return lambda **tensors: CASES[name].op(**tensors, **options, implementation=implementation)


@pytest.mark.sampled(2)
@each_step
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((1, 1, 1, 1, 1), torch.float32),
        ((3, 4, 2, 5, 2), torch.float32),
        ((2, 3, 4, 33, 1), torch.float32),
        ((2, 3, 4, 6, 1), torch.bfloat16),
        ((2, 3, 4, 6, 1), torch.float16),
    ],
    ids=str,
)
def test_equals_the_definition(name: str, size: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    if "lnlstm" in name and size[3] == 1:
        size = (*size[:3], 2, size[4])  # one value alone is normalised to 0, and its gradient is noise
    given = arguments(CASES[name], Make(device, seed=3), *size)
    assert_same_function(function(name), function(name, "reference"), given, dtype)


@pytest.mark.sampled(1)
@each_step
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_lengths(name: str, reverse: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are full, empty, or shorter, in blocks of two steps; poison in the padding."""
    monkeypatch.setattr(
        stepped, "split_blocks", lambda steps, *_, **__: [(k, min(k + 2, steps)) for k in range(0, steps, 2)]
    )
    monkeypatch.setattr(cells, "_UNITS", 4)
    lengths = torch.tensor([5, 0, 3])
    options = {"lengths": lengths.to(device), "reverse": reverse}

    def kernels(inputs: Tensor, **others: Any) -> Any:
        outputs, state = function(name, **options)(inputs=poisoned(inputs, lengths), **others)
        assert not padded_part(outputs, lengths).any()
        outputs.register_hook(lambda gradient: poisoned(gradient, lengths))
        return outputs, state

    given = arguments(CASES[name], Make(device), 3, 5, 3, 6, 1)
    assert_same_function(kernels, function(name, "reference", **options), given, torch.float32)


@pytest.mark.sampled(1)
@each_step
def test_memory_may_lie_anyhow_and_one_result_may_be_asked_for(name: str, device: str) -> None:
    given = scatter_strides(arguments(CASES[name], Make(device), 2, 3, 4, 4, 1))
    for part in (0, 1):
        assert_same_function(
            lambda part=part, **tensors: function(name)(**tensors)[part],
            lambda part=part, **tensors: function(name, "reference")(**tensors)[part],
            given,
            torch.float32,
        )
