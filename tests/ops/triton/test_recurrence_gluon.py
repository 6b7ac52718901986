"""The Gluon kernels of the linear recurrence against the definition; they need a GPU, for nothing interprets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import linear_recurrence
from econmt_ops.backends.triton import recurrence_gluon
from tests.ops.cases import Sizes, recurrence
from tests.ops.helpers import Make, assert_same_function, padded_part, poisoned, values_and_gradients
from tests.ops.test_linear_recurrence import check_extreme_decay
from tests.ops.triton.test_recurrence import check_captured, check_far_rows

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
REVERSE = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
SPAN, RADIX = 8, 4
TILE = SPAN * recurrence_gluon.WARPS


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Many tiles, groups and blocks in few steps; the tiles of a row of each launch."""
    monkeypatch.setattr(recurrence_gluon, "SPAN", SPAN)
    monkeypatch.setattr(recurrence_gluon, "RADIX", RADIX)
    found: list[int] = []
    grid_of = recurrence_gluon.grid_of

    def planned(like: Tensor) -> recurrence_gluon.TileGrid:
        found.append(grid_of(like).tiles)
        return grid_of(like)

    monkeypatch.setattr(recurrence_gluon, "grid_of", planned)
    return found


def tensors(make: Make, steps: int, initial: bool, rows: int = 2, hidden: int = 128) -> dict[str, Any]:
    found = recurrence(make, Sizes(rows, steps, H=hidden))
    return found if initial else {**found, "initial": None}


def function(**options: Any) -> Callable[..., Tensor]:
    return lambda **given: linear_recurrence(**given, **options)


@REVERSE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("steps", "initial"),
    [(1, True), (TILE - 1, False), (TILE, True), (TILE + 1, False), (200, True), (TILE * 37 - 5, True)],
)
def test_equals_the_definition(
    steps: int, initial: bool, dtype: torch.dtype, reverse: bool, launches: list[int]
) -> None:
    given = tensors(Make("cuda"), steps, initial)
    definition = function(reverse=reverse, implementation="chunk")
    assert_same_function(function(reverse=reverse, implementation="triton"), definition, given, dtype)
    assert launches == [-(-steps // TILE)] * 2


@REVERSE
def test_lengths(reverse: bool) -> None:
    """Rows that are full, empty, or end at, before and behind the end of a tile; poison in the padding."""
    lengths = torch.tensor([200, 0, TILE, TILE - 1, 2 * TILE + 1, 1])

    def kernels(decay: Tensor, inputs: Tensor, initial: Tensor) -> Tensor:
        outputs = linear_recurrence(
            poisoned(decay, lengths), poisoned(inputs, lengths), initial=initial, lengths=lengths.cuda(),
            reverse=reverse, implementation="triton",
        )  # fmt: skip
        assert not padded_part(outputs, lengths).any()
        outputs.register_hook(lambda gradient: poisoned(gradient, lengths))
        return outputs

    definition = function(lengths=lengths.cuda(), reverse=reverse, implementation="chunk")
    given = tensors(Make("cuda"), 200, True, rows=6, hidden=64)
    assert_same_function(kernels, definition, given, torch.float32)


def test_rows_that_lie_apart_and_one_decay_for_all(launches: list[int]) -> None:
    make = Make("cuda", torch.float32)
    slices = make(100, 2, 96)
    views = {"inputs": slices.transpose(0, 1)[:, :, 16:80], "decay": make(64).sigmoid()}
    kernels, definition = function(implementation="triton"), function(implementation="chunk")
    assert_same_function(kernels, definition, views, torch.float32)
    assert launches


@pytest.mark.parametrize("decay", [4.0, 0.0, -1.0, 1.0001])
def test_extreme_decays(decay: float) -> None:
    check_extreme_decay(decay, Make("cuda", torch.float32)(1, 130, 32), "triton")


def test_the_same_at_every_call() -> None:
    """Although tiles of several thousand programs wait for each other in any order."""
    make = Make("cuda", torch.float32)
    given = {"decay": make(2, 30_000, 128).sigmoid(), "inputs": make(2, 30_000, 128)}
    first, gradients = values_and_gradients(function(implementation="triton"), given)
    for _ in range(20):
        again, others = values_and_gradients(function(implementation="triton"), given)
        assert all(
            one.equal(other) for one, other in zip([*first, *gradients], [*again, *others], strict=True)
        )


def test_offsets_beyond_32_bits(launches: list[int]) -> None:
    check_far_rows("cuda", 32)
    assert launches


def test_captured() -> None:
    check_captured(64)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 40, 33), torch.float32), ((2, 40, 32), torch.bfloat16), ((2, 40, 32), torch.float64)],
    ids=str,
)
def test_other_tensors_take_the_other_kernels(
    shape: tuple[int, ...], dtype: torch.dtype, launches: list[int]
) -> None:
    make = Make("cuda")
    given = {"decay": make(*shape).sigmoid(), "inputs": make(*shape)}
    kernels, definition = function(implementation="triton"), function(implementation="chunk")
    assert_same_function(kernels, definition, given, dtype)
    assert not launches
