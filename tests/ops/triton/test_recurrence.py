"""The kernels of the linear recurrence against the definition, walked through tile by tile and with a program a tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import linear_recurrence
from econmt_ops.backends.triton import recurrence
from tests.ops.cases import CASES, Sizes
from tests.ops.checking import Variation, check
from tests.ops.helpers import (
    Make,
    assert_same_function,
)

TILED = pytest.mark.parametrize("tiled", [False, True], ids=["walk", "tiles"])
STEPS, RADIX = 8, 4


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch, tiled: bool) -> None:
    """Many tiles in few steps, and both ways to go through them."""
    monkeypatch.setattr(recurrence, "STEPS", STEPS)
    monkeypatch.setattr(recurrence, "_LINE", 32)
    monkeypatch.setattr(recurrence, "RADIX", RADIX)
    monkeypatch.setattr(recurrence.TileCut, "_fills_better_tiled", lambda *_: tiled)


def function(**options: Any) -> Callable[..., Tensor]:
    return lambda **given: linear_recurrence(**given, **options)


@pytest.mark.sampled(5)
@TILED
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(
    ("sizes", "ragged", "dtype"),
    [
        (Sizes(B=2, T=1, H=1), False, torch.float64),
        (Sizes(B=2, T=STEPS, H=5), False, torch.float64),
        (Sizes(B=2, T=STEPS + 1, H=3), False, torch.float32),
        (Sizes(B=2, T=3 * STEPS - 1, H=9), False, torch.bfloat16),
        (Sizes(B=2, T=20, H=17), False, torch.float16),
        (Sizes(B=6, T=STEPS + 1, H=2), True, torch.float64),
        (Sizes(B=1, T=STEPS * (2 * RADIX + 3) - 1, H=5), False, torch.float64),  # more tiles than a group has
    ],
    ids=str,
)
def test_equals_the_definition(
    sizes: Sizes, ragged: bool, dtype: torch.dtype, reverse: bool, device: str
) -> None:
    """With lengths, rows are full, empty, or end at and before the end of a tile, and padding is poisoned."""
    variation = Variation(sizes, ragged, state=sizes.T > 1, options={"reverse": reverse}, scattered=ragged)
    check(CASES["linear_recurrence"], variation, dtype, device, ["triton"])


@pytest.mark.sampled(1)
@TILED
def test_one_decay_for_all(device: str) -> None:
    slices = Make(device)(20, 2, 7)
    views = {"inputs": slices.transpose(0, 1)[:, :, 2:6], "decay": Make(device)(4)}
    assert_same_function(function(implementation="triton"), function(implementation="reference"), views)


@pytest.mark.sampled(1)
@TILED
@pytest.mark.parametrize(
    "decay", [4.0, *(pytest.param(value, marks=pytest.mark.thorough) for value in (0.0, -1.0, 1.0001))]
)
def test_extreme_decays(decay: float, device: str) -> None:
    inputs = Make(device, torch.float32)(1, 100, 2)
    if decay == 4.0:
        inputs[:, :70] = 0
    given = torch.full_like(inputs, decay)
    found = linear_recurrence(given, inputs, implementation="triton")
    expected = linear_recurrence(given.double(), inputs.double(), implementation="reference")
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@TILED
def test_offsets_beyond_32_bits(device: str) -> None:
    """Rows that lie 2^33 bytes apart, of which no memory but these rows is touched."""
    if device == "cuda":
        memory = torch.empty(2**31 + 64, dtype=torch.float32, device=device)
    else:
        memory = torch.empty(2**31 + 64, dtype=torch.float32)  # never written, so that it takes no memory
    views = [torch.as_strided(memory, (2, 2, 3), (2**31, 3, 1), 16 * number) for number in range(2)]
    values = Make(device, torch.float32)(2, 2, 2, 3)
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    found = linear_recurrence(views[0], views[1], implementation="triton")
    torch.testing.assert_close(found, linear_recurrence(values[0], values[1], implementation="reference"))


@TILED
@pytest.mark.cuda
def test_captured(tiled: bool) -> None:
    """In a CUDA graph, replayed with other values; at every replay the same."""
    make = Make("cuda", torch.float32)
    decay, inputs = make(1, 5000, 40).sigmoid(), make(1, 5000, 40)
    linear_recurrence(decay, inputs, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = linear_recurrence(decay, inputs, implementation="triton")
    inputs.copy_(make(1, 5000, 40))
    graph.replay()
    first = outputs.clone()
    torch.testing.assert_close(first, linear_recurrence(decay, inputs, implementation="chunk"))
    for _ in range(20):
        graph.replay()
        assert outputs.equal(first), tiled
