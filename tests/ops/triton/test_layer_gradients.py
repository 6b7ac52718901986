"""The gradients of a small layer by one launch, against products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.triton.layer_gradients import gradients_launch, is_small

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.cpu().double() - expected).norm() / (expected.norm() + 1e-6))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "backwards", "has_resets", "has_inputs"),
    [
        ((1, 1, 1, 1, 1), False, False, True),
        ((33, 3, 70, 72, 17), False, True, True),  # more than a tile of each, none of them full
        ((70, 7, 5, 8, 33), True, True, False),
        ((6, 6, 4, 4, 5), True, False, True),  # a single step has no states before it
    ],
)
def test_all_gradients(
    sizes: tuple[int, int, int, int, int],
    backwards: bool,
    has_resets: bool,
    has_inputs: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    rows, batch, size, wide, hidden = sizes
    torch.manual_seed(0)
    made = [
        torch.randn(rows, 4 * hidden),
        torch.randn(rows, wide),
        torch.randn(rows, hidden),
        torch.randn(4 * hidden, wide),
    ]
    dsums, inputs, outputs, matrix = (part.to(device, dtype) for part in made)
    resets = torch.rand(rows // batch, batch, device=device) < 0.3
    shapes = (rows, size), (4 * hidden, size), (4 * hidden, hidden), (4 * hidden,)
    found = [torch.full(shape, float("nan"), device=device) for shape in shapes]
    types = dtype, *(part.dtype for part in found)
    launch, programs, integers = gradients_launch(sizes, types, backwards, has_resets, has_inputs)
    launch(programs, (dsums, inputs, outputs, resets if has_resets else dsums, matrix, *found), integers)
    exact, read, states = (part.cpu().double() for part in (dsums, inputs, outputs))
    later, before = (exact[:-batch], states[batch:]) if backwards else (exact[batch:], states[:-batch])
    if has_resets:
        before = before.masked_fill(resets[1:].cpu().reshape(-1, 1), 0.0)
    wanted = (
        exact @ matrix.cpu().double()[:, :size],
        exact.t() @ read[:, :size],
        later.t() @ before,
        exact.sum(0),
    )
    # With tensor cores float32 is TF32.
    tolerance = 2e-6
    if device == "cuda":
        tolerance = 2e-3 if dtype == torch.float32 else 2e-5
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if number or has_inputs:
            assert difference(one, other) < tolerance, number
        else:
            assert one.isnan().all()


def test_each_gradient_has_a_type_of_its_own(device: str) -> None:
    sizes = 12, 3, 4, 4, 6
    dsums, read = torch.randn(12, 24, device=device), torch.randn(12, 4, device=device)
    outputs, matrix = torch.randn(12, 6, device=device), torch.randn(24, 4, device=device)
    results = []
    for kinds in ((torch.float32,) * 4, (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16)):
        shapes = (12, 4), (24, 4), (24, 6), (24,)
        found = [
            torch.empty(shape, dtype=kind, device=device) for shape, kind in zip(shapes, kinds, strict=True)
        ]
        launch, programs, integers = gradients_launch(sizes, (torch.float32, *kinds), False, False, True)
        launch(programs, (dsums, read, outputs, dsums, matrix, *found), integers)
        results.append(found)
    for exact, rounded in zip(*results, strict=True):
        torch.testing.assert_close(rounded.float(), exact, rtol=1e-2, atol=1e-2)


def test_which_layers_are_small() -> None:
    assert is_small(16 * 20, 64, 64)
    assert is_small(32 * 35, 200, 200)
    assert not is_small(256 * 50, 128, 128)
    assert not is_small(4096, 512, 512)
