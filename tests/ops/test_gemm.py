"""Products with a weight that is laid out once, of any number of rows, and at the widths at which they are fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from econmt_ops.backends.c import products
from econmt_ops.core.alignment import even, widened
from econmt_ops.linear import LAYOUTS
from econmt_ops.products import gemm
from econmt_ops.products.gemm import Layouts, Product
from econmt_ops.products.outer import add_outer
from tests.ops.helpers import Make, assert_close

TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_product_and_share_of_a_sum(layout: str, dtype: torch.dtype) -> None:
    make = Make("cpu", dtype)
    left, weight, bias, start = make(2, 3, 19), make(21, 19), make(21), make(3, 21)
    for given in (None, bias):
        expected = left.double() @ weight.double().t() + (0 if given is None else given.double())
        assert_close([Product(weight, given, layout)(left)], [expected], TOLERANCES[dtype])
    total = start.clone()
    share = Product(weight, None, layout).share(total, left[0])
    assert share is None or torch.equal(total, start)
    expected = start.double() + left[0].double() @ weight.double().t()
    assert_close([total if share is None else total + share], [expected], 2 * TOLERANCES[dtype])


@pytest.mark.parametrize("calls", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_of_a_larger_matrix_are_laid_out_first(dtype: torch.dtype, calls: int) -> None:
    # oneDNN would take a thousand times as long with them; of a strided bias it would add other numbers.
    whole, left = torch.randn(6, 9).to(dtype), torch.randn(4, 5).to(dtype)
    weight, bias = whole[:, 2:7], torch.randn(12).to(dtype)[::2]
    product = Product(weight, bias, calls=calls)
    if product._by_onednn and product._tiles is None:
        prepacked = product._weight
        assert prepacked.is_mkldnn or prepacked.is_contiguous() or prepacked.t().is_contiguous()
    expected = left.double() @ weight.double().t() + bias.double()
    assert_close([product(left)], [expected], 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.skipif(not gemm.is_available(torch.zeros(8, 8)), reason="oneDNN packs no float32 weights here")
def test_views_of_one_matrix_share_no_layout() -> None:
    """They begin at one place and have other shapes or strides, or begin at another place."""
    whole, left = torch.randn(8, 8), torch.randn(2, 8)
    views = [whole, whole.t(), whole[:4], whole[4:]]
    shared = Layouts(views)
    for view in views:
        assert_close([Product(view, calls=1000)(left)], [left @ view.t()], 1e-5)
    assert len(shared._packed) == len(views)


def test_calls_share_what_is_laid_out_as_long_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[torch.Size] = []

    def pack(weight: torch.Tensor, tiled: torch.dtype | None, how: Callable[..., Any] = gemm._pack) -> Any:
        packed.append(weight.shape)
        return how(weight, tiled)

    monkeypatch.setattr(gemm, "_pack", pack)
    # oneDNN's rule: that of the C library does not ask how a weight is stored.
    monkeypatch.setattr(products, "serves", lambda like: False)
    make = Make("cpu", torch.float32)
    left, weight, other = make(2, 19), make(21, 19), make(21, 19)
    shared = Layouts([weight])
    for _ in range(5):  # three calls each: the third time the eighth of all is made
        assert_close([Product(weight.detach(), calls=3)(left)], [left @ weight.t()], 1e-5)
        Product(weight.t(), calls=3)  # whose packing takes longer
        Product(other, calls=3)
    assert packed == [weight.shape]
    del shared
    weight.mul_(2.0)
    assert_close([Product(weight, calls=8)(left)], [left @ weight.t()], 1e-5)
    assert len(packed) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shared", [False, True])
def test_weight_and_bias_are_rounded_to_the_type_of_the_products(layout: str, shared: bool) -> None:
    weight, bias, rows = torch.randn(40, 24), torch.randn(40), torch.randn(6, 24).bfloat16()
    cache = Layouts([weight] if shared else [])
    exact = rows.double() @ weight.bfloat16().double().t() + bias.bfloat16().double()
    product = Product(weight, bias, layout, like=rows)(rows)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=2**-8)
    del cache


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outer_products_of_any_width_are_added(
    rows: int, columns: int, wide: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("econmt_ops.products.outer._BLOCK_BYTES", 1 << 12)
    left = torch.randn(5, 7, rows + 3 * wide, device=device, dtype=dtype)
    right = torch.randn(5, 7, columns + 2 * wide, device=device, dtype=dtype)
    if wide:
        left, right = (widened(each.flatten(0, 1)).view(5, 7, -1) for each in (left, right))
    exact = left[..., :rows].double().flatten(0, 1).t() @ right[..., :columns].double().flatten(0, 1)
    total = torch.full((rows, columns), torch.nan, device=device)
    add_outer(total, left, right, fresh=True)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2 if device == "cpu" else 1e-4}.get(dtype, 1e-4)
    torch.testing.assert_close(total.double(), exact, rtol=tolerance, atol=5 * tolerance)
    add_outer(total, left, right)
    torch.testing.assert_close(total.double(), 2 * exact, rtol=tolerance, atol=10 * tolerance)
