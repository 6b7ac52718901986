"""Products of the C library against float64, over the types and instruction sets that the machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import econmt_ops
from econmt_ops.backends import c as native
from econmt_ops.backends.c import products
from econmt_ops.backends.c.products import Tiles
from econmt_ops.products.gemm import Product, multiply
from econmt_ops.products.outer import add_outer, outer
from tests.ops.test_native import counted
from tests.ops.test_native import framed as framed_by_nan

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.skipif(
    not products.serves(torch.zeros(1, dtype=BFLOAT16)), reason="no bfloat16 instructions, or no C library"
)
types = pytest.mark.parametrize(
    "kind",
    [
        BFLOAT16,
        pytest.param(
            FLOAT32,
            marks=pytest.mark.skipif(not products.serves(torch.zeros(1)), reason="no processor of AMD"),
        ),
    ],
    ids=str,
)
SMALL = [(1, 1, 1), (5, 7, 3), (16, 32, 16), (17, 33, 31)]
SHAPES = [*SMALL, (33, 65, 17), (64, 64, 48), (130, 513, 40), (300, 1100, 70)]
"""Rows, inputs and outputs: squares, blocks of rows and of inputs that are full, and not."""


@pytest.fixture(params=[2, 3], ids=["dot", "tiles"], autouse=True)
def _instructions(request: pytest.FixtureRequest, use: Callable[[int], None]) -> None:
    """Runs a test by AVX-512's instructions and, where the machine has them, by AMX."""
    use(request.param)


@pytest.fixture(params=[1, 3], ids=["one-thread", "threads"])
def _threads_for_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides a product among threads, however small it is."""
    monkeypatch.setattr(native, "_FEW", 0)
    torch.set_num_threads(request.param)


def framed(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a matrix of ones within a larger matrix of sevens, and that one."""
    whole = torch.full((rows + 2, columns + 5), 7.0, dtype=dtype)
    inner = whole[1:-1, 2:-3]
    inner.fill_(1.0)
    return inner, whole


def columns(matrix: Tensor) -> Tensor:
    """Returns the same values stored column by column, as part of a larger matrix."""
    rows, width = matrix.shape
    whole = torch.full((width, rows + 3), float("nan"), dtype=matrix.dtype)
    whole[:, 1 : rows + 1] = matrix.t()
    return whole[:, 1 : rows + 1].t()


def assert_near(found: Tensor, expected: Tensor, left: Tensor, weight: Tensor) -> None:
    """Compares within the rounding of float32 sums and of the result's type."""
    sizes = left.double().abs() @ weight.double().abs().t() + 2.0
    rounding = 2.0**-8 if found.dtype == BFLOAT16 else 0.0
    bound = sizes * 2.0**-20 + expected.abs() * rounding
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.sampled(32)
@pytest.mark.usefixtures("_threads_for_all")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@types
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["written", "added"])
def test_product(shape: tuple[int, int, int], kind: torch.dtype, dtype: torch.dtype, adds: bool) -> None:
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(rows, inputs, generator=generator).to(kind)
    weight = torch.randn(outputs, inputs, generator=generator).to(kind)
    bias = torch.randn(outputs, generator=generator)
    expected = left.double() @ weight.double().t() + bias.double() + adds
    # float32 operands are rounded as these already are.
    wide = left.float(), weight.float()
    for source in (left, columns(left), wide[0], columns(wide[0]), framed_by_nan(left)):
        for matrix in (weight, columns(weight), wide[1], columns(wide[1]), framed_by_nan(weight)):
            out, whole = framed(rows, outputs, dtype)
            assert Tiles(matrix, kind).multiply(out, source, bias, adds) is out
            assert_near(out, expected, left, weight)
            out.fill_(7.0)
            assert (whole == 7.0).all()


@types
def test_a_result_is_independent_of_other_rows_and_outputs(kind: torch.dtype) -> None:
    left, weight = torch.randn(70, 600).to(kind), torch.randn(90, 600).to(kind)
    whole = Tiles(weight, kind).multiply(torch.empty(70, 90), left)
    part = Tiles(weight[40:50], kind).multiply(torch.empty(3, 10), left[5:8])
    assert torch.equal(part, whole[5:8, 40:50])


@types
def test_nan_and_infinity_reach_their_row_and_output_alone(kind: torch.dtype) -> None:
    left, weight = torch.ones(40, 50, dtype=kind), torch.ones(60, 50, dtype=kind)
    left[3, 49], weight[59, 0] = float("nan"), float("inf")
    out = Tiles(weight, kind).multiply(torch.empty(40, 60), left)
    assert out[3].isnan().all()
    assert out[[0, 39], 59].isinf().all()
    out[3], out[:, 59] = 50.0, 50.0
    assert (out == 50.0).all()


def test_floats_are_rounded_to_nearest_even() -> None:
    values = torch.tensor([[1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20, -3.0e38]])
    out = Tiles(torch.eye(4), BFLOAT16).multiply(torch.empty(1, 4), values)
    assert torch.equal(out, values.to(BFLOAT16).float())


@types
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(9, 40, 50), (150, 140, 130)])
def test_products_with_and_without_the_library_agree(
    kind: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    left, weight, bias = (torch.randn(*shape).to(kind) for shape in shapes)

    def results() -> list[Tensor]:
        product, plain = Product(weight, bias), Product(weight)
        into = torch.empty(rows, outputs + 10, dtype=kind)[:, 5:-5]
        start = torch.ones(rows, outputs, dtype=kind)
        plain.into(into, left, start)
        shared = start.clone()
        share = plain.share(shared, left)
        total = torch.ones(outputs, inputs)
        add_outer(total, into.unsqueeze(0), left.unsqueeze(0))
        return [
            product(left.view(3, -1, inputs)),
            into.clone(),
            shared if share is None else shared + share,
            plain.plus(start.clone(), left),
            multiply(left, weight, bias),
            multiply(left, weight, out=start.clone(), adds=True),
            total,
            outer(into.contiguous(), left, torch.float32, width=30),
        ]

    found = results()
    with native.without():
        expected = results()
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        near = {"rtol": 1e-5, "atol": 1e-3} if kind == FLOAT32 else {"rtol": 2e-2, "atol": 0.2}
        torch.testing.assert_close(one.float(), other.float(), **near)


@types
def test_factors_are_brought_to_the_type_of_the_products(kind: torch.dtype) -> None:
    left, weight = torch.randn(5, 40).to(BFLOAT16), torch.randn(30, 40).to(BFLOAT16)
    for other in (left, left.float()):
        found = Tiles(weight, kind).multiply(torch.empty(5, 30), other)
        assert_near(found, left.double() @ weight.double().t(), left, weight)


def test_nothing_is_multiplied_by_torch() -> None:
    weight = torch.randn(5, 3).to(BFLOAT16)
    assert multiply(weight[:0], weight).shape == (0, 5)
    assert (multiply(torch.empty(4, 0, dtype=BFLOAT16), torch.empty(5, 0, dtype=BFLOAT16)) == 0.0).all()
    assert Product(weight)(weight[:0]).shape == (0, 5)


def test_operations_multiply_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a layer, and its gradients, make no product of a shape of their own by another library."""
    counts = counted(monkeypatch)
    lstm = econmt_ops.LSTM(24, 24, batch_first=True, implementation="recompute")
    with torch.autocast("cpu", BFLOAT16):
        outputs, _ = lstm(torch.randn(3, 7, 24, requires_grad=True))
    before = counts["product_tiles"]
    outputs.float().sum().backward()
    # Recomputed gates, h, weights and inputs.
    assert counts["product_tiles"] - before >= 7 + 4
