"""The output layer in slices of the vocabulary against float64, wherever logits lie."""

from __future__ import annotations

import pytest
import torch

from econmt_ops.linear_cross_entropy import recompute
from econmt_ops.linear_cross_entropy import word_slices as kernels
from tests.ops.triton.test_cross_entropy import arguments, assert_same

DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    """Slices of 16 and 8 words of 6 rows, in memory that held something else."""
    monkeypatch.setattr(recompute, "LARGE_VOCABULARY", 50)
    monkeypatch.setattr(kernels, "_ROUND_WORDS", 8)
    monkeypatch.setattr(kernels, "SLICE_BYTES", 6 * 16 * 2)
    monkeypatch.setattr(kernels, "_BUFFER_BYTES", 6 * 8 * 2)


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
    given = arguments(rows, hidden, vocabulary, bias, DTYPE)
    for name in ("weight", "bias"):
        given[name] = None if given[name] is None else given[name].to(weight_dtype)
    found = assert_same(given, device, DTYPE, reduction, smoothing)
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
