from __future__ import annotations

import pytest
import torch

from econmt_ops import attentional_lstm, dropout_mask
from econmt_ops.products.dropout import RowsSeed, SeedCounter, apply_dropout, derive_seed, dropout, keep_mask
from econmt_ops.products.reversal import reverse_rows
from econmt_ops.products.stack import StackOptions, run_stack
from tests.ops.cases import CASES, Sizes
from tests.ops.helpers import Make


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_zero_or_scaled(dtype: torch.dtype, device: str) -> None:
    mask = dropout_mask((50, 40), 0.2, 3, torch.device(device), dtype)
    assert mask.dtype == dtype
    assert mask.device.type == device
    assert mask.unique().tolist() == [0.0, float(torch.tensor(1.25, dtype=dtype))]


def test_same_seed_gives_the_same_mask_in_every_type(device: str) -> None:
    place = torch.device(device)
    mask = dropout_mask((7, 9), 0.5, 3, place, torch.float32)
    assert mask.equal(dropout_mask((7, 9), 0.5, 3, place, torch.float32))
    assert mask.equal(dropout_mask((7, 9), 0.5, 3, place, torch.bfloat16).float())
    assert not mask.equal(dropout_mask((7, 9), 0.5, 4, place, torch.float32))


def test_leaves_the_global_generator_alone(device: str) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3, device=device)
    torch.manual_seed(1)
    dropout_mask((7, 9), 0.5, 3, torch.device(device), torch.float32)
    assert torch.rand(3, device=device).equal(expected)


def test_apply_multiplies_with_the_mask_and_hides_what_is_dropped(device: str) -> None:
    place = torch.device(device)
    values = torch.randn(6, 5, device=device, dtype=torch.float64)
    keep = keep_mask((6, 5), 0.4, 8, place)
    expected = values * dropout_mask((6, 5), 0.4, 8, place, torch.float64)
    assert torch.allclose(apply_dropout(values, keep, 0.4), expected, rtol=1e-15, atol=0)
    poisoned = values.masked_fill(~keep, float("nan"))
    assert torch.allclose(apply_dropout(poisoned, keep, 0.4), expected, rtol=1e-15, atol=0)
    assert apply_dropout(values, None, 0.4) is values


def test_derived_seeds_differ() -> None:
    seeds = {derive_seed(seed, index) for seed in range(-50, 50) for index in range(20)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_step_has_as_many_seeds_as_it_draws(device: str) -> None:
    counter = SeedCounter(1, torch.device(device), draws=2)
    found = set()
    for _ in range(3):
        found |= {derive_seed(int(seed), k) for seed in (counter.draw(), counter.draw()) for k in range(4)}
        with pytest.raises(ValueError, match="a step draws more than 2 seeds; raise draws"):
            counter.draw()
        counter.advance()
    assert len(found) == 24
    assert not SeedCounter(2, torch.device(device), draws=2).seeds.eq(counter.seeds).any()


def test_is_registered_with_torch(device: str) -> None:
    place = torch.device(device)
    torch.library.opcheck(torch.ops.econmt_ops.keep_mask.default, ((3, 4), 0.5, 7, 1, place))
    assert keep_mask((3, 4), 0.5, 7, torch.device("meta")).shape == (3, 4)
    seed, values = torch.tensor(7, device=device), torch.randn(2, 3, 4, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.econmt_ops.keep_mask.default, ((3, 4), 0.5, 0, 1, place, seed))
    torch.library.opcheck(torch.ops.econmt_ops.dropout.default, (values, 0.5, 0, 1, True, seed))


def test_a_seed_in_a_tensor_is_counted_alike_everywhere(device: str) -> None:
    """And is not that of PyTorch's generator."""
    shape, place = (3, 5, 7), torch.device(device)
    mask = keep_mask(shape, 0.5, torch.tensor(9, device=device), place, 2)
    assert mask.cpu().equal(keep_mask(shape, 0.5, torch.tensor(9), torch.device("cpu"), 2))
    derived = derive_seed(torch.tensor(9, device=device), 2)
    assert int(derived) == derive_seed(9, 2)
    assert mask.equal(keep_mask(shape, 0.5, derived, place))
    assert not mask.cpu().equal(keep_mask(shape, 0.5, 9, torch.device("cpu"), 2))
    masks = StackOptions(dropout=0.5, seed=torch.tensor(9, device=device)).keep_masks(2, (3, 5, 7), place)
    assert masks[1] is not None
    assert masks[1].equal(keep_mask(shape, 0.5, torch.tensor(9, device=device), place, 1))


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.25, 0.5, 0.8, 1 - 1e-9])
def test_the_share_that_is_kept(p: float, device: str) -> None:
    count, kept = 200_001, max(1 - p, 2.0**-16)  # of 16 bits at least one value is kept
    mask = keep_mask((count,), p, 5, torch.device(device))
    # Four standard deviations of a binomial distribution of as many draws at most.
    assert abs(int(mask.sum()) - count * kept) <= 4 * (count * p * (1 - p)) ** 0.5 + 2


@pytest.mark.parametrize("variational", [False, True])
@pytest.mark.parametrize("counted", [False, True], ids=["drawn", "counted"])
def test_masks_of_some_rows_are_cut_from_those_of_all(device: str, counted: bool, variational: bool) -> None:
    place = torch.device(device)
    seed = torch.tensor(77, device=place) if counted else 77
    values = torch.ones(7, 3, 5, device=place, requires_grad=True)
    whole = dropout(values, 0.4, seed, variational, 2)
    weights = torch.randn_like(whole)
    (expected,) = torch.autograd.grad((whole * weights).sum(), values)
    for begin, end in ((0, 2), (2, 3), (3, 7), (6, 7)):
        part = values.detach()[begin:end].requires_grad_()
        found = dropout(part, 0.4, RowsSeed(seed, begin), variational, 2)
        assert found.equal(whole[begin:end])
        (gradient,) = torch.autograd.grad((found * weights[begin:end]).sum(), part)
        assert gradient.equal(expected[begin:end])
        kept = keep_mask((end - begin, 9), 0.5, RowsSeed(seed, begin), place)
        assert kept.equal(keep_mask((7, 9), 0.5, seed, place)[begin:end])


@pytest.mark.parametrize("implementation", ["reference", "recompute"])
def test_a_decoder_drops_in_some_rows_what_it_drops_in_all(implementation: str) -> None:
    given = CASES["attentional-lstm-additive"].tensors(Make("cpu", torch.float32), Sizes(B=5, T=6))
    weights = given["weights"]

    def run(rows: slice, seed: int | RowsSeed) -> torch.Tensor:
        parts = (given[name][rows] for name in ("inputs", "keys", "values"))
        options = {"dropout": 0.5, "dropout_seed": seed, "implementation": implementation}
        return attentional_lstm(*parts, weights, lengths=None, **options)[0]  # type: ignore[arg-type]

    whole = run(slice(None), 9)
    torch.testing.assert_close(run(slice(2, 4), RowsSeed(9, 2)), whole[2:4])
    assert not torch.allclose(run(slice(2, 4), 9), whole[2:4])


@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 2, 0])])
@pytest.mark.parametrize("reverses", [False, True])
def test_masks_are_of_positions_in_either_direction(lengths: torch.Tensor | None, reverses: bool) -> None:
    """Of layers that add up what they have read."""
    options, inputs = StackOptions(lengths=lengths, dropout=0.5, seed=7), torch.ones(3, 4, 5)
    found, _ = run_stack(lambda number, read: (read.cumsum(1), number), inputs, 3, options, reverses=reverses)
    expected = inputs
    for mask in options.keep_masks(3, (3, 4, 5), torch.device("cpu")):
        given = expected if mask is None else 2.0 * mask * expected
        rows = reverse_rows(given, lengths) if reverses else given
        expected = reverse_rows(rows.cumsum(1), lengths) if reverses else rows.cumsum(1)
    valid = torch.arange(4) < (torch.tensor([4, 4, 4]) if lengths is None else lengths)[:, None]
    assert torch.equal(found[valid], expected[valid])
