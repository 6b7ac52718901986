from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import econmt_ops
from econmt_ops.backends.triton.cross_entropy import scale
from econmt_ops.linear_cross_entropy import row_chunks as kernels
from tests.ops.helpers import assert_close
from tests.ops.test_linear_cross_entropy import (  # noqa: F401  # the same claims of the kernels
    test_extreme_logits,
    test_nothing_to_count,
    test_precisions,
    test_softmax_is_in_float32,
)

linear_cross_entropy = functools.partial(econmt_ops.linear_cross_entropy, implementation="triton")

# A CPU's float32 product sums thousands of terms one after the other.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def arguments(
    rows: int, hidden: int, vocabulary: int, bias: bool, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """On the CPU: hidden in the compute type, weights in float32, a third of the rows that do not count."""
    draw = torch.Generator().manual_seed(rows + vocabulary)
    targets = torch.randint(vocabulary, (rows,), generator=draw)
    targets[2::3] = -7
    return {
        "hidden": torch.randn(rows, hidden, generator=draw).to(dtype),
        "weight": torch.randn(vocabulary, hidden, generator=draw),
        "targets": targets,
        "bias": torch.randn(vocabulary, generator=draw) if bias else None,
    }


def results(function: Any, given: dict[str, Any], factor: Tensor, **options: Any) -> list[Tensor]:
    """The loss and the gradients of hidden, weight and bias."""
    own = {name: given[name].detach().requires_grad_() for name in ("hidden", "weight")}
    if given["bias"] is not None:
        own["bias"] = given["bias"].detach().requires_grad_()
    loss = function(**{**given, **own}, **options)
    return [loss.detach(), *torch.autograd.grad((loss * factor).sum(), list(own.values()))]


def by_torch(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, dtype: torch.dtype, **options: Any
) -> Tensor:
    """In float64, of the same, rounded values."""
    weight, bias = weight.to(dtype).double(), None if bias is None else bias.to(dtype).double()
    return functional.cross_entropy(functional.linear(hidden.double(), weight, bias), targets, **options)


def moved(given: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: None if value is None else value.to(device) for name, value in given.items()}


def assert_same(
    given: dict[str, Any], device: str, dtype: torch.dtype, reduction: str, smoothing: float
) -> list[Tensor]:
    options = {"label_smoothing": smoothing, "ignore_index": -7, "reduction": reduction}
    draw = torch.Generator().manual_seed(3)
    factor = torch.randn(len(given["targets"]) if reduction == "none" else (), generator=draw).abs()
    expected = results(by_torch, given, factor.double(), dtype=dtype, **options)
    found = results(linear_cross_entropy, moved(given, device), factor.to(device), **options)
    kinds = [given[name].dtype for name in ("hidden", "weight", "bias") if given[name] is not None]
    assert [part.dtype for part in found] == [torch.promote_types(dtype, torch.float32), *kinds]
    assert_close(found, expected, TOLERANCE[dtype])
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("rows", "hidden", "vocabulary"),
    [(1, 1, 1), (1, 5, 7), (3, 8, 4097), (130, 6, 7), (3, 4, 1000)],
    ids=lambda size: str(size),
)
@pytest.mark.parametrize(("reduction", "bias"), [("mean", True), ("sum", False), ("none", True)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_float32(
    rows: int, hidden: int, vocabulary: int, reduction: str, smoothing: float, bias: bool, device: str
) -> None:
    assert_same(arguments(rows, hidden, vocabulary, bias), device, torch.float32, reduction, smoothing)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("poisoned_memory")
@DTYPE
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_many_chunks_of_rows(
    monkeypatch: pytest.MonkeyPatch, reduction: str, dtype: torch.dtype, device: str
) -> None:
    """Chunks of 64 rows, the last one of two, and buffers that held something else."""
    monkeypatch.setattr(
        kernels, "CHUNK_BYTES", 64 * 128 * dtype.itemsize * (2 if dtype == torch.float32 else 1)
    )
    found = assert_same(arguments(130, 8, 101, True, dtype), device, dtype, reduction, 0.1)
    assert found[1][2::3].eq(0).all()
    assert found[1][0].ne(0).any()


@pytest.mark.parametrize(("hidden", "vocabulary"), [(16, 77), (13, 77), (13, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_odd_widths_of_a_16_bit_weight(
    hidden: int, vocabulary: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that needs no cast is padded too: no product has an odd width, and the results are the same."""
    given = arguments(72, hidden, vocabulary, True, dtype)
    given = {name: value.to(dtype) if name in ("weight", "bias") else value for name, value in given.items()}
    widths: list[tuple[int, ...]] = []

    def spy(product: Any, *operands: Any, **options: Any) -> Any:
        widths.extend(tuple(each.shape) for each in operands[-2:])
        return product(*operands, **options)

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, functools.partial(spy, getattr(torch, name)))
    assert_same(given, device, dtype, "sum", 0.1)
    assert widths
    assert all(columns % 8 == 0 for _, columns in widths), widths


def test_sizes_of_chunks() -> None:
    most = 32 << 20
    assert kernels._chunk_rows(1, 64_000, most) == 64
    assert kernels._chunk_rows(6400, 64_000, most) == 512
    assert kernels._chunk_rows(12_800, 15_488, most) == 1856
    assert kernels._chunk_rows(6400, 128_000, most // 2) == 128
    assert kernels._chunk_rows(100, 1 << 24, most) == 2
    assert kernels._chunk_rows(100, 1 << 26, most) == 1
    for rows in (1, 63, 64, 65, 700, 12_800):
        for row_bytes in (256, 3000, 64_000, 1 << 20):
            assert 1 <= kernels._chunk_rows(rows, row_bytes, most) <= max(1, most // row_bytes)


def test_rows_that_do_not_count_may_hold_anything(device: str) -> None:
    given = moved(arguments(6, 3, 5, True), device)
    poisoned = {**given, "hidden": given["hidden"].clone()}
    poisoned["hidden"][2::3] = math.inf
    found = []
    for values in (given, poisoned):
        losses = linear_cross_entropy(**values, label_smoothing=0.1, ignore_index=-7, reduction="none")
        found.append(losses)
    assert found[0].equal(found[1])
    assert found[0][2::3].eq(0).all()


def test_a_maximum_that_grows_along_a_row(device: str) -> None:
    hidden, targets = torch.ones(2, 1, device=device), torch.tensor([0, 19_999], device=device)
    weight = torch.linspace(-30.0, 60.0, 20_000, device=device).unsqueeze(1)  # many blocks of words
    found = linear_cross_entropy(hidden, weight, targets, reduction="none")
    exact = functional.cross_entropy(hidden.double() @ weight.double().t(), targets, reduction="none")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_float64_goes_another_way(device: str) -> None:
    given = arguments(5, 4, 9, True)
    given = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    assert_same(given, device, torch.float64, "mean", 0.1)


@DTYPE
@pytest.mark.parametrize("count", [0, 1, 8192, 20_000])
def test_the_gradient_of_the_loss_scales_every_value(count: int, dtype: torch.dtype, device: str) -> None:
    values = torch.randn(count, device=device).to(dtype)
    for factor in (1.0, 0.3, 1e6, math.nan):
        found = values.clone()
        scale(found, torch.tensor(factor, device=device))
        torch.testing.assert_close(found, (values.float() * factor).to(dtype), equal_nan=True)


def test_weights_and_biases_of_any_type(device: str) -> None:
    """A bias that needs no cast beside a weight that does, and the other way round."""
    given = arguments(3, 8, 101, True, torch.bfloat16)
    for name in ("weight", "bias"):
        mixed = {**given, name: given[name].bfloat16()}
        options = {"label_smoothing": 0.1, "ignore_index": -7, "reduction": "sum"}
        one = torch.ones((), device=device)
        found = results(linear_cross_entropy, moved(mixed, device), one, **options)
        expected = results(linear_cross_entropy, moved(given, device), one, **options)
        assert found[0].equal(expected[0])
        for left, right in zip(found[1:], expected[1:], strict=True):
            assert left.equal(right.to(left.dtype))


@pytest.mark.cuda
def test_repeats_are_equal_bit_for_bit() -> None:
    device = "cuda"
    given = moved(arguments(1300, 64, 3300, True, torch.bfloat16), device)
    options = {"label_smoothing": 0.1, "ignore_index": -7, "reduction": "mean"}
    runs = [results(linear_cross_entropy, given, torch.ones((), device=device), **options) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert one.equal(other)


@pytest.mark.cuda
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_a_graph(reduction: str) -> None:
    """Forward and backward captured, replayed with other values, and never a wait."""
    given = moved(arguments(130, 16, 1000, True, torch.bfloat16), "cuda")
    options = {"label_smoothing": 0.1, "ignore_index": -7, "reduction": reduction}
    factor = torch.ones(130 if reduction == "none" else (), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(linear_cross_entropy, given, factor, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = results(linear_cross_entropy, given, factor, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    given["hidden"].mul_(-0.5)
    given["targets"].add_(1).remainder_(1000)
    graph.replay()
    for one, other in zip(found, results(linear_cross_entropy, given, factor, **options), strict=True):
        assert one.equal(other)
