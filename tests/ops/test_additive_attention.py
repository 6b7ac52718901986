"""Scores of attention that are large or sums of many small numbers."""

from __future__ import annotations

import pytest
import torch

from econmt_ops import additive_attention
from tests.ops.helpers import Make, assert_close, each_implementation


@each_implementation("additive_attention")
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


@each_implementation("additive_attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_accumulate_in_float32(dtype: torch.dtype, implementation: str, device: str) -> None:
    # One score is 1024 times 1/256, the other 0; a sum in bfloat16 would stop at 1.
    keys = torch.tensor([50.0, 0.0], dtype=dtype, device=device).view(1, 2, 1).expand(1, 2, 1024)
    weight = torch.full((1024,), 2.0**-8, dtype=dtype, device=device)
    query = torch.zeros(1, 1, 1024, dtype=dtype, device=device)
    _, weights = additive_attention(query, keys, keys, weight, lengths=None, implementation=implementation)
    assert_close([weights[0, 0]], [torch.tensor([4.0, 0.0], device=device).softmax(0)], 4e-3)
