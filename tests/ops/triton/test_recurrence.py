"""The kernels of the linear recurrence against the definition, walked through tile by tile and with a program a tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import linear_recurrence
from econmt_ops.backends.triton import recurrence
from econmt_ops.linear_recurrence import scan
from tests.ops.cases import CASES, Sizes
from tests.ops.checking import Variation, check
from tests.ops.helpers import (
    Make,
    assert_same_function,
    values_and_gradients,
)
from tests.ops.test_linear_recurrence import check_extreme_decay

TILED = pytest.mark.parametrize("tiled", [False, True], ids=["walk", "tiles"])
STEPS, RADIX = 8, 4


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch, tiled: bool) -> None:
    """Many tiles in few steps, and both ways to go through them."""
    monkeypatch.setitem(scan._BLOCK, "triton", STEPS)
    monkeypatch.setattr(recurrence, "_LINE", 32)
    monkeypatch.setattr(recurrence, "RADIX", RADIX)
    monkeypatch.setattr(recurrence.TileCut, "_fills_better_tiled", lambda *_: tiled)


def function(**options: Any) -> Callable[..., Tensor]:
    return lambda **given: linear_recurrence(**given, **options)


@pytest.mark.sampled(5)
@TILED
@pytest.mark.parametrize("case", ["linear_recurrence", "linear_recurrence-carries"])
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
    sizes: Sizes, ragged: bool, dtype: torch.dtype, reverse: bool, case: str, device: str
) -> None:
    """With lengths, rows are full, empty, or end at and before the end of a tile, and padding is poisoned."""
    variation = Variation(sizes, ragged, state=sizes.T > 1, options={"reverse": reverse}, scattered=ragged)
    check(CASES[case], variation, dtype, device, ["triton"])


@pytest.mark.sampled(1)
@TILED
@pytest.mark.parametrize(
    ("dtype", "reverse"),
    [pytest.param(torch.float32, False, marks=pytest.mark.thorough), (torch.bfloat16, True)],
    ids=str,
)
def test_the_stash_changes_nothing(reverse: bool, dtype: torch.dtype, device: str) -> None:
    given = CASES["linear_recurrence"].tensors(Make(device, dtype), Sizes(B=1, T=45, H=3))
    found = [
        values_and_gradients(function(reverse=reverse, stash=stash, implementation="triton"), given)
        for stash in ("outputs", "carries")
    ]
    for left, right in zip(*found, strict=True):
        assert all(one.equal(other) for one, other in zip(left, right, strict=True))


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
    check_extreme_decay(decay, Make(device, torch.float32)(1, 100, 2), "triton")


@TILED
def test_offsets_beyond_32_bits(device: str) -> None:
    check_far_rows(device, 3)


def check_far_rows(device: str, hidden: int) -> None:
    """Rows that lie 2^33 bytes apart, of which no memory but these rows is touched, so that a CPU's takes none."""
    memory = torch.empty(2**31 + 4096, dtype=torch.float32, device=device)
    views = [torch.as_strided(memory, (2, 2, hidden), (2**31, hidden, 1), 1024 * n) for n in range(2)]
    values = Make(device, torch.float32)(2, 2, 2, hidden)
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    found = linear_recurrence(views[0], views[1], implementation="triton")
    torch.testing.assert_close(found, linear_recurrence(values[0], values[1], implementation="reference"))


@TILED
@pytest.mark.cuda
def test_captured() -> None:
    check_captured(40)


def check_captured(hidden: int) -> None:
    """In a CUDA graph, replayed with other values; at every replay the same."""
    make = Make("cuda", torch.float32)
    decay, inputs = make(1, 5000, hidden).sigmoid(), make(1, 5000, hidden)
    linear_recurrence(decay, inputs, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = linear_recurrence(decay, inputs, implementation="triton")
    inputs.copy_(make(1, 5000, hidden))
    graph.replay()
    first = outputs.clone()
    torch.testing.assert_close(first, linear_recurrence(decay, inputs, implementation="chunk"))
    for _ in range(20):
        graph.replay()
        assert outputs.equal(first)
