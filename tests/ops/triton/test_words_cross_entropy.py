"""The output layer in slices of the vocabulary against float64, wherever logits lie."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from econmt_ops.linear_cross_entropy import recompute
from econmt_ops.linear_cross_entropy import word_slices as kernels
from tests.ops.triton.test_cross_entropy import (
    TOLERANCE,
    arguments,
    by_torch,
    linear_cross_entropy,
    moved,
    results,
)

DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 16 and 8 words of 6 rows, in memory that held something else."""
    monkeypatch.setattr(recompute, "LARGE_VOCABULARY", 50)
    monkeypatch.setattr(kernels, "_ROUND_WORDS", 8)
    monkeypatch.setattr(kernels, "SLICE_BYTES", 6 * 16 * 2)
    monkeypatch.setattr(kernels, "_BUFFER_BYTES", 6 * 8 * 2)
    made = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        tensor = made(self, *size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def check(
    given: dict[str, Any], weight_dtype: torch.dtype, device: str, reduction: str, smoothing: float
) -> list[torch.Tensor]:
    given = {
        name: value.to(weight_dtype) if name in ("weight", "bias") and value is not None else value
        for name, value in given.items()
    }
    options = {"label_smoothing": smoothing, "ignore_index": -7, "reduction": reduction}
    draw = torch.Generator().manual_seed(3)
    factor = torch.randn(len(given["targets"]) if reduction == "none" else (), generator=draw).abs()
    expected = results(by_torch, given, factor.double(), dtype=DTYPE, **options)
    found = results(linear_cross_entropy, moved(given, device), factor.to(device), **options)
    types = [torch.float32, DTYPE, weight_dtype, weight_dtype]
    for number, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert left.dtype == types[number]
        error = float((left.cpu().double() - right.double()).detach().abs().max())
        assert error <= TOLERANCE[DTYPE] * max(1.0, float(right.detach().abs().max())), (number, error)
    return found


@pytest.mark.sampled(3)
# Fewer rows than the weight is wide, as many, and more: then fewer and fewer logits stay where the gradient will be.
@pytest.mark.parametrize(("rows", "hidden"), [(6, 8), (5, 8), (14, 8), (6, 32), (1, 8)], ids=str)
@pytest.mark.parametrize("vocabulary", [64, 101])
@pytest.mark.parametrize(
    ("reduction", "smoothing", "bias", "weight_dtype"),
    [
        ("mean", 0.0, False, torch.bfloat16),
        ("sum", 0.1, True, torch.bfloat16),
        ("none", 0.1, True, torch.float32),
    ],
    ids=str,
)
def test_equals_torch(
    rows: int,
    hidden: int,
    vocabulary: int,
    reduction: str,
    smoothing: float,
    bias: bool,
    weight_dtype: torch.dtype,
    device: str,
) -> None:
    found = check(
        arguments(rows, hidden, vocabulary, bias, DTYPE), weight_dtype, device, reduction, smoothing
    )
    assert found[1][2::3].eq(0).all()


@pytest.mark.parametrize(("rows", "hidden", "kept"), [(8192, 2048, 4), (4096, 4096, 9)])
def test_where_logits_lie(rows: int, hidden: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slice's logits are overwritten before they are used, neither by gradients nor by each other."""
    monkeypatch.undo()
    words = 128_256
    given = torch.empty(rows, hidden, dtype=DTYPE, device="meta")
    dweight = torch.empty(words, hidden, dtype=DTYPE, device="meta")
    slices = kernels._Slices(given, words, dweight)
    assert slices.kept == kept
    assert slices.parts[0].start == 0
    assert slices.parts[-1].stop == words
    value = dweight.element_size()
    for number, part in enumerate(slices.parts):
        if number:
            assert part.start == slices.parts[number - 1].stop
        first, second = slices.first_place(number), slices.second_place(number)
        assert first.shape == second.shape == (rows, part.stop - part.start)
        begin = second.storage_offset()
        in_dweight = second.untyped_storage()._cdata == dweight.untyped_storage()._cdata
        if number < slices.kept:
            assert in_dweight
            assert first.storage_offset() == begin
            if number:
                assert begin >= slices.second_place(number - 1).storage_offset() + first.numel()
        else:
            assert first.storage_offset() + first.numel() <= slices.second_place(0).storage_offset()
        if in_dweight:
            # Behind the gradients of this slice and of all before it.
            assert begin >= part.stop * hidden
            assert begin + second.numel() <= dweight.numel()
    room = slices._buffer.numel() * value + rows * hidden * 2
    assert room <= 64_000_000
