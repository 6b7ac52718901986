"""Decoders of every cell, output and coverage by Triton kernels: values and gradients of the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import econmt_ops
from tests.ops.decoder_parts import PARTS, Case, arguments, lengths_of, options
from tests.ops.helpers import Make, assert_same_function

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
