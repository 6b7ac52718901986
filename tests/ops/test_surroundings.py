"""PyTorch's global defaults and activation checkpointing change no result of any op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import econmt_ops
from tests.ops.empty import run
from tests.ops.layouts import problems, variants
from tests.ops.test_empty import options_of

PROBLEMS = problems("cpu")
each_variant = pytest.mark.parametrize(
    ("problem", "implementation"), [each for each in variants() if each[1] not in ("triton", "compiled")]
)


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Sets PyTorch's default type and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.sampled(20)
@each_variant
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")], ids=str
)
def test_defaults_change_no_result(
    problem: str, implementation: str, dtype: torch.dtype, other: str, device: str
) -> None:
    call = problems(device)[problem]
    for options in options_of(problem, implementation, device):
        options["implementation"] = implementation
        expected = run(call, **options)
        with defaults(dtype, other):
            found = run(call, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.sampled(10)
@each_variant
def test_checkpointing_changes_no_result(problem: str, implementation: str, device: str) -> None:
    call = problems(device)[problem]
    for options in options_of(problem, implementation, device):
        options["implementation"] = implementation
        checkpointed = call._replace(function=partial(checkpoint, call.function, use_reentrant=False))
        torch.testing.assert_close(run(checkpointed, **options), run(call, **options), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_rows_and_dropout_are_on_their_own_device(kind: str, device: str) -> None:
    layer = getattr(econmt_ops, kind)(5, 7, 2, dropout=0.5, device=device)
    packed = pack_sequence([torch.randn(length, 5, device=device) for length in (2, 4)], enforce_sorted=False)
    rows = []
    for other in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(other):
            rows.append(layer(packed)[0].data)
    torch.testing.assert_close(*rows, rtol=0, atol=0)
