"""Widths at which products are fast, and the products that are made at them."""

from __future__ import annotations

import pytest
import torch

from econmt_ops.core.alignment import even, widened
from econmt_ops.products.outer import add_outer


def test_rows_of_16_bits_are_multiples_of_16_bytes() -> None:
    assert [even(size, torch.bfloat16) for size in (1, 8, 9, 1500)] == [8, 8, 16, 1504]
    assert even(1500, torch.float32) == 1500


@pytest.mark.parametrize("width", [1, 8, 13])
def test_what_is_added_is_zero(width: int, device: str) -> None:
    poison = torch.full((64, 64), torch.nan, device=device, dtype=torch.bfloat16)
    del poison
    matrix = torch.randn(3, width, device=device)
    wide = widened(matrix.bfloat16())
    assert wide.shape == (3, even(width, torch.bfloat16))
    assert torch.equal(wide[:, :width], matrix.bfloat16())
    assert not wide[:, width:].any()
    assert widened(matrix) is matrix
    assert widened(wide) is wide


@pytest.mark.parametrize(("rows", "columns"), [(8, 16), (13, 16), (16, 13), (130, 21), (1, 1)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outer_products_of_any_width_are_added(
    rows: int, columns: int, wide: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("econmt_ops.core.chunks._LARGE_BLOCK_BYTES", 1 << 12)
    left = torch.randn(5, 7, rows + 3 * wide, device=device, dtype=dtype)
    right = torch.randn(5, 7, columns + 2 * wide, device=device, dtype=dtype)
    if wide:
        left, right = (widened(each.flatten(0, 1)).view(5, 7, -1) for each in (left, right))
    exact = left[..., :rows].double().flatten(0, 1).t() @ right[..., :columns].double().flatten(0, 1)
    total = torch.full((rows, columns), torch.nan, device=device)
    add_outer(total, left, right, fresh=True)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2 if device == "cpu" else 1e-4}[dtype]
    torch.testing.assert_close(total.double(), exact, rtol=tolerance, atol=5 * tolerance)
    add_outer(total, left, right)
    torch.testing.assert_close(total.double(), 2 * exact, rtol=tolerance, atol=10 * tolerance)
