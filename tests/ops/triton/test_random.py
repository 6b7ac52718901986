from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.triton import random, reversal
from econmt_ops.products.dropout import (
    RowsSeed,
    SeedCounter,
    apply_dropout,
    derive_seed,
    dropout,
    keep_mask,
    keep_threshold,
    philox,
)

HUGE = (1 << 63) - 5


def seed_of(number: int, device: str) -> Tensor:
    return torch.tensor(number, dtype=torch.int64, device=device)


@pytest.mark.parametrize(
    ("seed", "counter"), [(0, 0), (0, 1), (-1, (1 << 62) + 12345), (HUGE, (7 << 32) + 9)]
)
def test_philox_is_that_of_its_authors(seed: int, counter: int, device: str) -> None:
    """By the known answer of their library, and by their definition in Python's numbers."""
    state, keys = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        left, right = 0xD2511F53 * state[0], 0xCD9E8D57 * state[2]
        first, third = (right >> 32) ^ state[1] ^ keys[0], (left >> 32) ^ state[3] ^ keys[1]
        state = [first, right & 0xFFFFFFFF, third, left & 0xFFFFFFFF]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    found = philox(seed_of(seed, device), seed_of(counter, device).view(1))
    assert [int(word) for word in found] == state
    assert (seed, counter) != (0, 0) or state == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", [0, 3, -3, HUGE, -HUGE])
@pytest.mark.parametrize("index", [-1, 0, 1, 5])
def test_kernel_and_pytorch_make_the_same_mask(seed: int, index: int, device: str) -> None:
    place = torch.device("cpu")
    expected = keep_mask((1, 3001), 0.3, seed_of(seed, "cpu"), place, index)
    found = random.keep_mask(3001, seed_of(seed, device), index, keep_threshold(0.3))
    assert found.dtype == torch.bool
    assert found.cpu().equal(expected[0])
    derived = seed if index < 0 else derive_seed(seed, index)
    assert expected.equal(keep_mask((1, 3001), 0.3, seed_of(derived, "cpu"), place))


@pytest.mark.parametrize(("rows", "positions"), [(70_000, 2), (2, 600_000)])
def test_a_grid_may_have_any_number_of_rows_and_positions(
    rows: int, positions: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA allows 65,535 programs along the axes of a grid other than the first."""
    kernel = MagicMock()
    monkeypatch.setattr(random, "dropout_values", kernel)
    monkeypatch.setattr(reversal, "reversal_rows", kernel)
    values = torch.empty(rows, positions, 1, dtype=torch.bfloat16, device=device)
    for variational in (False, True):
        random.dropout(values, seed_of(1, device), -1, 50_000, 1.25, variational)
        random.dropout(values.transpose(0, 1), seed_of(1, device), -1, 50_000, 1.25, variational)
    reversal.reverse(values, torch.empty(rows, dtype=torch.int64, device=device))
    grids = [call.args[0] for call in kernel.__getitem__.call_args_list]
    assert [grid for grid in grids if grid[0] >= 1 << 31 or max(grid[1:], default=0) >= 1 << 16] == []
    assert len(grids) == 5


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 2049])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.5, 1 - 1e-9])
def test_masks_of_odd_sizes(elements: int, p: float, device: str) -> None:
    found = random.keep_mask(elements, seed_of(4, device), -1, keep_threshold(p))
    assert found.cpu().equal(keep_mask((elements,), p, seed_of(4, "cpu"), torch.device("cpu")))


@pytest.mark.sampled(13)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (2, 9, 24), (2, 3, 2050), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("variational", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_in_one_kernel(
    shape: tuple[int, ...], variational: bool, dtype: torch.dtype, device: str
) -> None:
    """Rows that begin anywhere in a group; what is dropped may be NaN."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask_shape = (shape[0], 1, shape[2]) if variational else shape
    keep = keep_mask(mask_shape, 0.4, seed_of(8, "cpu"), torch.device("cpu"), 2)
    expected = apply_dropout(values, keep, 0.4)
    poisoned = values.masked_fill(~keep, float("nan")).to(device)
    options = keep_threshold(0.4), 1.0 / (1.0 - 0.4), variational
    found = random.dropout(poisoned, seed_of(8, device), 2, *options)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0.0)
    assert found.cpu().eq(0).equal(expected.eq(0))


@pytest.mark.parametrize("first", [1, 3, 8, 300])
def test_kernels_make_the_masks_of_some_rows(first: int, device: str) -> None:
    """Rows of five elements, so that most begin inside a group."""
    seed = RowsSeed(seed_of(8, "cpu"), first)
    expected = keep_mask((7, 5), 0.4, seed, torch.device("cpu"), 2)
    threshold = keep_threshold(0.4)
    found = random.keep_mask(35, seed_of(8, device), 2, threshold, 5 * first)
    assert found.cpu().equal(expected.flatten())
    values = torch.ones(7, 5, device=device)
    for variational, shape in ((False, (7, 1, 5)), (True, (7, 2, 5))):
        given = values[:, None].expand(shape), seed_of(8, device), 2, threshold, 1.0
        dropped = random.dropout(*given, variational, first)
        assert dropped.cpu().bool().equal(expected[:, None].expand(shape))


def test_the_last_elements_of_a_mask_that_begins_inside_a_group(device: str) -> None:
    """Rows of one element, of which the first begins a group less one: one group more than the elements fill."""
    rows = 8 * random._GROUPS
    expected = keep_mask((rows, 1), 0.4, RowsSeed(seed_of(8, "cpu"), 1), torch.device("cpu"), 2)
    ones = torch.ones(rows, 1, 1, device=device)
    found = random.dropout(ones, seed_of(8, device), 2, keep_threshold(0.4), 1.0, False, 1)
    assert found.cpu().bool().flatten().equal(expected.flatten())


def layouts(device: str, width: int) -> list[Tensor]:
    """Positions before rows, some positions of many, columns before positions, values that overlap, and other ranks."""
    whole = torch.randn(9, 2, width, device=device)
    part = whole[:3]
    return [
        whole.transpose(0, 1),
        part[:, :1],
        part.transpose(1, 2),
        part[1:].transpose(0, 1),
        part[:, :1].transpose(0, 1),
        part.flatten()[:14].as_strided((2, 3, 5), (1, 5, 1)),
        part[:1].expand(2, 2, width),
        part[0].t(),
        part.unflatten(0, (3, 1)).permute(2, 1, 0, 3),
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variational", [False, True])
@pytest.mark.parametrize(("width", "first"), [(5, 0), (16, 0), (5, 3), (16, 3)])
def test_what_is_not_contiguous(variational: bool, width: int, first: int, device: str) -> None:
    arguments = seed_of(8, device), 0, 30_000, 2.0, variational, first
    for values in layouts(device, width):
        found = random.dropout(values, *arguments)
        assert found.equal(random.dropout(values.contiguous(), *arguments))
        assert found.stride() == random.results_like(values).stride()
    assert random.dropout(layouts(device, width)[0], *arguments).stride() == (width, 2 * width, 1)


@pytest.mark.parametrize("variational", [False, True])
def test_the_operator_is_registered_as_torch_expects(variational: bool, device: str) -> None:
    """A compiled graph, too, knows how its results lie."""
    for values in layouts(device, 8):
        given = values.detach().requires_grad_(), 0.5, 0, 1, variational, seed_of(3, device)
        torch.library.opcheck(torch.ops.econmt_ops.dropout.default, given, test_utils="test_faketensor")


@pytest.mark.parametrize("variational", [False, True])
def test_gradient(variational: bool, device: str) -> None:
    """Of the public function with a seed on the device: the same mask forward and backward."""
    values = torch.ones(3, 4, 5, device=device, requires_grad=True)
    found = dropout(values, 0.5, seed_of(3, device), variational)
    (gradient,) = torch.autograd.grad(found.sum(), values)
    assert gradient.equal(found.detach())
    assert set(found.unique().tolist()) == {0.0, 2.0}


def test_bits_are_even_and_unrelated(device: str) -> None:
    """Shares, neighbours, and masks of other seeds and indices: within four standard deviations."""
    place, count = torch.device(device), 40_000
    masks = [
        keep_mask((count,), 0.5, seed_of(seed, device), place, index).double() * 2 - 1
        for seed, index in ((0, -1), (1, -1), (0, 0), (0, 1), (1, 0), (1 << 32, 0))
    ]
    bound = 4 * count**-0.5
    for number, mask in enumerate(masks):
        assert abs(float(mask.mean())) < bound
        for other in masks[:number]:
            assert abs(float((mask * other).mean())) < bound
        for distance in (1, 2, 4, 8, 64):
            assert abs(float((mask[distance:] * mask[:-distance]).mean())) < bound * 1.1


def test_a_seed_that_moves_on_before_the_backward_pass_is_found_out(device: str) -> None:
    counter = SeedCounter(5, torch.device(device))
    values = torch.ones(3, 4, device=device, requires_grad=True)
    dropped = dropout(values, 0.5, counter.draw())
    counter.advance()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        dropped.sum().backward()


@pytest.mark.cuda
def test_each_replay_of_a_graph_draws_anew() -> None:
    device = torch.device("cuda")
    counter, twin = SeedCounter(5, device), SeedCounter(5, device)
    values = torch.ones(8, 100, device=device)

    def step(seeds: SeedCounter) -> Tensor:
        seeds.advance()
        return dropout(values, 0.5, seeds.draw()) + dropout(values, 0.5, seeds.draw(), index=1)

    step(SeedCounter(0, device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(counter)
    counter.seeds.copy_(SeedCounter(5, device).seeds)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(found.clone())
        assert found.equal(step(twin))
    assert not results[0].equal(results[1])
