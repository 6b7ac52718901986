"""Decoders of every cell, output and coverage by Triton kernels: values and gradients of the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import econmt_ops
from tests.ops.decoder_parts import PARTS, Case, arguments, lengths_of, options
from tests.ops.helpers import Make, assert_close, assert_same_function, to

SIZES = SimpleNamespace(B=3, T=3, S=5, I=6, H=9, A=7, E=4)


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_values_and_gradients(case: Case, device: str) -> None:
    make = Make(device)
    given = arguments(make, case, SIZES)
    lengths = lengths_of(case, SIZES, device)

    def call(implementation: str, **tensors: Any) -> Any:
        return econmt_ops.attentional_lstm(
            **tensors, lengths=lengths, **options(case), implementation=implementation
        )

    assert_same_function(
        lambda **tensors: call("triton", **tensors),
        lambda **tensors: call("reference", **tensors),
        given,
        torch.float32,
    )


@pytest.mark.parametrize("kind", ["tanh", "gru"])
def test_without_gradients(kind: str, device: str) -> None:
    """No step reads a coverage that it has begun to write."""
    case = Case("lstm", kind, layers=1)
    given, lengths = arguments(Make(device), case, SIZES), lengths_of(case, SIZES, device)
    given = to(torch.float32, given)
    with torch.no_grad():
        found, want = (
            econmt_ops.attentional_lstm(**given, lengths=lengths, **options(case), implementation=name)
            for name in ("triton", "reference")
        )
    assert_close([*found[:2], found[2].coverage], [*want[:2], want[2].coverage], 2e-6)


@pytest.mark.parametrize("kind", ["sum", "gru"])
def test_a_first_coverage_of_any_layout(kind: str, device: str) -> None:
    case = Case("lstm", kind, layers=1)
    given, lengths = arguments(Make(device), case, SIZES), lengths_of(case, SIZES, device)
    coverage = given["state"].coverage
    given["state"] = given["state"]._replace(coverage=coverage.transpose(0, 1).contiguous().transpose(0, 1))

    def call(implementation: str, **tensors: Any) -> Any:
        return econmt_ops.attentional_lstm(
            **tensors, lengths=lengths, **options(case), implementation=implementation
        )

    assert_same_function(
        lambda **tensors: call("triton", **tensors),
        lambda **tensors: call("reference", **tensors),
        given,
        torch.float32,
    )
