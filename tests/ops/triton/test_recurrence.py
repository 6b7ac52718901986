"""The kernels of the linear recurrence against the definition; they need a GPU, for nothing interprets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import linear_recurrence
from econmt_ops.backends.triton import recurrence
from tests.ops.cases import Sizes
from tests.ops.cases import recurrence as case
from tests.ops.helpers import Make, assert_same_function, padded_part, poisoned, values_and_gradients
from tests.ops.test_linear_recurrence import check_extreme_decay

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
REVERSE = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
SPAN, RADIX = 8, 4
TILE = SPAN * recurrence.WARPS


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Many tiles, groups and blocks in few steps; the tiles of a row of each launch."""
    monkeypatch.setattr(recurrence, "SPAN", SPAN)
    monkeypatch.setattr(recurrence, "RADIX", RADIX)
    found: list[int] = []
    grid_of = recurrence.grid_of

    def planned(like: Tensor) -> recurrence.TileGrid:
        found.append(grid_of(like).tiles)
        return grid_of(like)

    monkeypatch.setattr(recurrence, "grid_of", planned)
    return found


def tensors(make: Make, steps: int, initial: bool, rows: int = 2, hidden: int = 128) -> dict[str, Any]:
    found = case(make, Sizes(rows, steps, H=hidden))
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
    """Rows that lie 2^33 bytes apart."""
    memory = torch.empty(2**31 + 4096, dtype=torch.float32, device="cuda")
    views = [torch.as_strided(memory, (2, 2, 32), (2**31, 32, 1), 1024 * number) for number in range(2)]
    values = Make("cuda", torch.float32)(2, 2, 2, 32)
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    found = linear_recurrence(views[0], views[1], implementation="triton")
    torch.testing.assert_close(found, linear_recurrence(values[0], values[1], implementation="reference"))
    assert launches


def test_captured() -> None:
    """In a CUDA graph, replayed with other values; at every replay the same."""
    make = Make("cuda", torch.float32)
    decay, inputs = make(1, 5000, 64).sigmoid(), make(1, 5000, 64)
    linear_recurrence(decay, inputs, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = linear_recurrence(decay, inputs, implementation="triton")
    inputs.copy_(make(1, 5000, 64))
    graph.replay()
    first = outputs.clone()
    torch.testing.assert_close(first, linear_recurrence(decay, inputs, implementation="chunk"))
    for _ in range(20):
        graph.replay()
        assert outputs.equal(first)


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(33, torch.float32), (32, torch.bfloat16), (1, torch.float16), (128, torch.float64)],
    ids=str,
)
def test_units_that_do_not_fill_a_cache_line_and_float64_which_takes_tensor_operations(
    hidden: int, dtype: torch.dtype, launches: list[int]
) -> None:
    given = tensors(Make("cuda"), 40, True, hidden=hidden)
    kernels = function(implementation="triton")
    assert_same_function(kernels, function(implementation="chunk"), given, dtype)
    assert len(launches) == (0 if dtype == torch.float64 else 2)
