"""The kernels around linear recurrences against the definitions of the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.triton import scan_cells
from tests.ops.helpers import (
    Make,
    assert_close,
    assert_same_function,
    padded_part,
    poisoned,
    scatter_strides,
    to,
)
from tests.ops.test_cells import (
    CASES,
    SCANS,
    TINY_GATES,
    arguments,
    check_closed_gates,
    check_tiny_shares,
)

FIRST = ("sru", "ssru", "gilr_lstm")
"""One of each kind of recurrence and output; in the interpreter the others take their time."""

each_scan = pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.thorough) for name in SCANS]
)


def function(name: str, implementation: str = "triton", **options: Any) -> Any:
    return lambda **tensors: CASES[name].op(**tensors, **options, implementation=implementation)


SIZES = {
    "tiny": ((1, 1, 1, 1, 1), torch.float64, "outputs"),
    "as-wide": ((2, 2, 5, 5, 1), torch.float64, "gates"),
    "wide": ((1, 9, 3, 33, 1), torch.float32, "gates"),
    "bfloat16": ((2, 5, 4, 6, 1), torch.bfloat16, "gates"),
    "float16": ((2, 5, 4, 6, 1), torch.float16, "outputs"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "size", "dtype", "stash"),
    [
        *(pytest.param(name, *each, id=f"{name}-{kind}") for name in SCANS for kind, each in SIZES.items()),
        pytest.param(
            "gilr_lstm", (1, 101, 2, 1, 1), torch.float64, "outputs", id="long", marks=pytest.mark.thorough
        ),
        pytest.param("sru", (2, 8, 5, 5, 3), torch.float32, "outputs", id="deep"),
    ],
)
def test_equals_the_definition(
    name: str, size: tuple[int, ...], dtype: torch.dtype, stash: str, device: str
) -> None:
    given = arguments(CASES[name], Make(device, seed=3), *size)
    assert_same_function(function(name, stash=stash), function(name, "reference"), given, dtype)


@pytest.mark.sampled(1)
@each_scan
@pytest.mark.parametrize(("reverse", "stash"), [(False, "gates"), (True, "outputs")], ids=str)
def test_lengths(name: str, reverse: bool, stash: str, device: str) -> None:
    """Rows that are full, empty, or end at, before and behind the end of a block; poison in the padding."""
    lengths = torch.tensor([10, 0, 8, 9])
    options = {"lengths": lengths.to(device), "reverse": reverse, "residual": True}

    def kernels(inputs: Tensor, **others: Any) -> Any:
        outputs, state = function(name, stash=stash, **options)(inputs=poisoned(inputs, lengths), **others)
        assert not padded_part(outputs, lengths).any()
        outputs.register_hook(lambda gradient: poisoned(gradient, lengths))
        return outputs, state

    given = arguments(CASES[name], Make(device), 4, 10, 3, 4, 1)
    assert_same_function(kernels, function(name, "reference", **options), given)


@pytest.mark.sampled(1)
@each_scan
def test_memory_may_lie_anyhow_and_nothing_is_asked_of_the_outputs(name: str, device: str) -> None:
    given = scatter_strides(arguments(CASES[name], Make(device), 2, 5, 2, 2, 1))
    assert_same_function(
        lambda **tensors: function(name)(**tensors)[1],
        lambda **tensors: function(name, "reference")(**tensors)[1],
        given,
    )
    assert_same_function(
        lambda **tensors: function(name)(**tensors)[0].transpose(0, 1),
        lambda **tensors: function(name, "reference")(**tensors)[0].transpose(0, 1),
        given,
    )


@pytest.mark.thorough
def test_units_of_many_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_cells, "_UNITS", 4)
    given = arguments(CASES["sru"], Make(device), 3, 5, 10, 10, 1)
    assert_same_function(function("sru"), function("sru", "reference"), given)


@pytest.mark.sampled(1)
@each_scan
def test_dropout_and_weights_of_another_type(name: str, device: str) -> None:
    """float32 weights under bfloat16 inputs: their gradients have their type."""
    given = arguments(CASES[name], Make(device), 2, 4, 3, 5, 2)
    low = {**to(torch.float32, given), "inputs": given["inputs"].to(torch.bfloat16)}
    options = {"dropout": 0.4, "dropout_seed": 9}
    layers = [part.requires_grad_() for layer in low["layers"] for part in layer]
    found = []
    for implementation in ("triton", "recompute"):
        outputs, _ = function(name, implementation, **options)(**low)
        found.append(torch.autograd.grad(outputs.float().square().sum(), layers))
        assert all(part.dtype == torch.float32 for part in found[-1])
    assert_close(found[0], found[1], 6e-2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "ragged"), [("gilr_lstm", False), ("sru", True), ("min_lstm", True)], ids=str
)
def test_chunks_of_steps(name: str, ragged: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two blocks; rows that end in the first, at an end of one, and in the last, which is shorter."""
    monkeypatch.setattr(scan_cells, "_chunks", lambda *_: 3)
    lengths = torch.tensor([40, 11, 32]).to(device) if ragged else None
    given = arguments(CASES[name], Make(device), 3 if ragged else 1, 40, 2, 3, 1)
    options = {"lengths": lengths}
    assert_same_function(function(name, **options), function(name, "reference", **options), given)


@TINY_GATES
def test_min_lstm_divides_gates_too_small_for_a_float(
    dtype: torch.dtype, f: float, i: float, device: str
) -> None:
    check_tiny_shares("triton", device, dtype, f, i)


def test_min_lstm_has_gates_that_are_closed_and_passes_nan_on(device: str) -> None:
    check_closed_gates("triton", device)
