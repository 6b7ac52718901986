"""Products in 8 bits, and the most probable words, by the C library at every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from econmt_ops.backends import c as native
from econmt_ops.core.int8 import rounded
from econmt_ops.products.int8 import Int8Product
from tests.conftest import run_python
from tests.ops.test_native_layers import definition

SIZES = [(1, 1, 1), (3, 5, 17), (16, 64, 16), (65, 66, 33), (130, 7, 48), (12, 1024, 20)]


@pytest.fixture(params=["tensors", 0, 1, 2])
def _level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Takes the library with these instructions at most, or none."""
    if request.param == "tensors":
        with native.without():
            yield
        return
    request.getfixturevalue("use")(request.param)
    yield


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("sizes", SIZES)
def test_a_product_is_that_of_the_rounded_values(sizes: tuple[int, int, int]) -> None:
    rows, inputs, outputs = sizes
    torch.manual_seed(rows)
    left = torch.randn(rows, inputs + 3)[:, :inputs]
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    left[rows // 2] = 0.0
    weight[0] *= 100.0
    whole = definition(left, weight, torch.int8)
    torch.testing.assert_close(Int8Product(weight, bias)(left).double(), whole + bias, rtol=1e-5, atol=1e-4)
    start = torch.randn(rows, outputs)
    before = start.clone().double()
    made = Int8Product(weight).plus(start, left)
    torch.testing.assert_close(made.double(), before + whole, rtol=1e-5, atol=1e-4)
    assert Int8Product(weight)(left.expand(2, *left.shape)).shape == (2, rows, outputs)


@pytest.mark.usefixtures("_level")
def test_rounding_is_within_half_a_step() -> None:
    torch.manual_seed(2)
    left, weight = torch.randn(9, 96), torch.randn(31, 96)
    found = Int8Product(weight)(left)
    exact = left @ weight.t()
    (_, steps), (_, others) = rounded(left), rounded(weight)
    bound = 0.5 * (steps[:, None] * weight.abs().sum(1) + others * left.abs().sum(1)[:, None]) * 1.01
    assert ((found - exact).abs() <= bound).all()
    assert (found - exact).abs().max() > 0


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    product, left = Int8Product(torch.randn(20, 24)), torch.randn(5, 24)
    left[2, 3] = bad
    assert product(left).isfinite().all(1).tolist() == [True, True, False, True, True]


FEWER = """
import torch
from econmt_ops.products.int8 import Int8Product
torch.manual_seed(1)
product, left = Int8Product(torch.randn(256, 256)), torch.randn(3000, 256)
alone = product(left)
torch.set_num_threads(4)
assert all(torch.equal(product(left), alone) for _ in range(12))
"""


@pytest.mark.slow  # a process of its own
def test_fewer_threads_than_were_asked_for_do_all_the_work() -> None:
    run_python("-c", FEWER, env={"OMP_THREAD_LIMIT": "2"})


def test_threads_share_the_rows() -> None:
    product, left = Int8Product(torch.randn(40, 300)), torch.randn(200, 300)
    torch.set_num_threads(1)
    alone = product(left)
    torch.set_num_threads(3)
    torch.testing.assert_close(product(left), alone, rtol=0, atol=0)


def test_weights_that_are_rounded_twice_stay_as_they_are() -> None:
    values, steps = rounded(torch.randn(50, 33))
    again, same = rounded(values * steps[:, None])
    torch.testing.assert_close(again, values)
    torch.testing.assert_close(same, steps)
