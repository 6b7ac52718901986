from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops import linear_cross_entropy
from econmt_ops.linear_cross_entropy import recompute
from tests.ops.helpers import Make, assert_same_function, each_implementation, to

pytestmark = each_implementation("linear_cross_entropy")
REDUCTION = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, device: str) -> None:
    """Chunks of two rows of 11 words in float64, in memory that held something else."""
    monkeypatch.setattr(recompute, "CHUNK_BYTES", 2 * 11 * 8)
    if device == "cpu":
        request.getfixturevalue("poisoned_memory")


def arguments(make: Make, rows: int, hidden: int, vocabulary: int, bias: bool = True) -> dict[str, Any]:
    matrices = {"hidden": make(rows, hidden), "weight": make(vocabulary, hidden)}
    return {**matrices, "bias": make(vocabulary) if bias else None}


def by_torch(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight, bias), targets, **options)


def some_targets(rows: int, vocabulary: int, device: str, ignored: int | None = None) -> Tensor:
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(2))
    if ignored is not None:
        targets[1::3] = ignored
    return targets.to(device)


@pytest.mark.parametrize(
    ("rows", "hidden", "vocabulary"),
    [(1, 1, 1), (5, 7, 11), (17, 8, 3)],
    ids=["N1-H1-V1", "N5-H7-V11", "N17-H8-V3"],
)
@REDUCTION
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_equals_torch(
    rows: int,
    hidden: int,
    vocabulary: int,
    reduction: str,
    smoothing: float,
    bias: bool,
    implementation: str,
    device: str,
) -> None:
    targets = some_targets(rows, vocabulary, device, ignored=-7)
    options = {"label_smoothing": smoothing, "ignore_index": -7, "reduction": reduction}
    tensors = arguments(Make(device), rows, hidden, vocabulary, bias)
    function = partial(linear_cross_entropy, targets=targets, **options, implementation=implementation)
    assert_same_function(function, partial(by_torch, targets=targets, **options), tensors)


@REDUCTION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precisions(reduction: str, dtype: torch.dtype, implementation: str, device: str) -> None:
    targets = some_targets(9, 21, device, ignored=-100)
    options = {"label_smoothing": 0.1, "reduction": reduction}

    def function(**tensors: Any) -> Tensor:
        loss = linear_cross_entropy(targets=targets, **tensors, **options, implementation=implementation)
        assert loss.dtype == torch.float32
        return loss

    wanted = partial(by_torch, targets=targets, **options)
    assert_same_function(function, wanted, arguments(Make(device), 9, 8, 21), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_softmax_is_in_float32(dtype: torch.dtype, implementation: str, device: str) -> None:
    # All logits are equal, so the loss is log(V) to the accuracy of float32; in bfloat16 it would be 8.3125.
    hidden, weight = torch.zeros(3, 4, device=device), torch.ones(4001, 4, device=device)
    tensors, targets = to(dtype, {"hidden": hidden, "weight": weight}), some_targets(3, 4001, device)
    loss = linear_cross_entropy(**tensors, targets=targets, implementation=implementation)
    assert float(loss) == pytest.approx(math.log(4001), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_to_count(smoothing: float, implementation: str, device: str) -> None:
    tensors = arguments(Make(device, torch.float32), 4, 3, 5)
    targets = torch.full((4,), -100, device=device)

    def loss(reduction: str) -> Tensor:
        options = {"label_smoothing": smoothing, "reduction": reduction}
        return linear_cross_entropy(targets=targets, **tensors, **options, implementation=implementation)

    assert loss("mean").isnan()
    assert loss("sum").eq(0)
    assert loss("none").eq(0).all()
    for reduction in ("mean", "sum"):
        wanted = [x.detach().requires_grad_() for x in tensors.values()]
        tensors.update(zip(tensors, wanted, strict=True))
        gradients = torch.autograd.grad(loss(reduction), wanted)
        assert all(x.eq(0).all() for x in gradients), reduction


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_extreme_logits(smoothing: float, implementation: str, device: str) -> None:
    """Far apart, equal, and infinitely small where no target is."""
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], device=device)
    weight = torch.tensor([[1e4, 0.0], [0.0, 0.0], [-1e4, 0.0]], device=device)
    targets = torch.tensor([0, 2, 1], device=device)
    options = {"label_smoothing": smoothing, "reduction": "none"}
    losses = linear_cross_entropy(hidden, weight, targets, **options, implementation=implementation)
    expected = functional.cross_entropy((hidden @ weight.t()).double(), targets, **options)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    if smoothing == 0.0:
        bias = torch.tensor([0.0, -math.inf, 0.0], device=device)
        targets[2] = 0
        losses = linear_cross_entropy(
            hidden, weight, targets, bias=bias, **options, implementation=implementation
        )
        torch.testing.assert_close(losses.cpu(), torch.tensor([0.0, 2e4, math.log(2.0)]))
