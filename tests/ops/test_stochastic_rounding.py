"""Stochastic rounding is right on average, is repeated exactly, and lets parameters in bfloat16 learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt_ops.optimizers.eight_bit import EightBitOptimizer
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.optimizers.in_backward import BackwardUpdates
from econmt_ops.optimizers.stochastic_rounding import _hash_, _hashed, round_into, salt_of

KINDS: list[tuple[type[FusedOptimizer], dict[str, Any]]] = [
    (FusedOptimizer, {"name": "adam"}),
    (FusedOptimizer, {"name": "sgd", "momentum": 0.9}),
    (FusedOptimizer, {"name": "sgd"}),
    (EightBitOptimizer, {"name": "adam8bit"}),
]


def rounded(values: Tensor, step: int, salt: int = 7, begin: int = 0) -> Tensor:
    result = torch.empty_like(values, dtype=torch.bfloat16)
    round_into(result, values, torch.tensor(float(step)), salt, begin)
    return result


def test_the_mean_is_the_value_and_neighbours_are_the_only_results() -> None:
    """1 + 2^-8 q lies between 1 and 1 + 2^-7; the standard error of 4,000 rounds is 1.6 % of the distance at most."""
    shares = torch.linspace(0.0, 1.0, 33)
    values = (1.0 + 2.0**-7 * shares) * torch.tensor([1.0, -1.0])[:, None]
    results = torch.stack([rounded(values, step) for step in range(4000)]).float()
    found = (results.abs() - 1.0) * 2.0**7
    assert set(found.unique().tolist()) == {0.0, 1.0}
    assert (found.mean(0) - shares).abs().max() < 5 * 0.5 / 4000**0.5
    assert found[:, :, 0].max() == 0.0
    assert found[:, :, -1].min() == 1.0
    # Steps and positions are independent of each other.
    half = found[:, 0, 16] - 0.5
    assert abs(float((half[1:] * half[:-1]).mean())) < 0.02
    assert abs(float((half * (found[:, 1, 16] - 0.5)).mean())) < 0.02


def test_noise_depends_on_seed_parameter_step_and_position() -> None:
    values = torch.full((1000,), 1.0 + 2.0**-8)
    first = rounded(values, 5, salt_of(1, 0))
    assert first.equal(rounded(values, 5, salt_of(1, 0)))
    parts = rounded(values[:300], 5, salt_of(1, 0)), rounded(values[300:], 5, salt_of(1, 0), begin=300)
    assert first.equal(torch.cat(parts))
    for other in (
        rounded(values, 6, salt_of(1, 0)),
        rounded(values, 5, salt_of(2, 0)),
        rounded(values, 5, salt_of(1, 1)),
        rounded(values, 5, salt_of(1 + (1 << 32), 0)),
    ):
        assert 0.4 < float((first == other).float().mean()) < 0.6


def test_hashes_on_tensors_are_those_of_integers() -> None:
    numbers = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 123456789]
    bits = torch.tensor(numbers, dtype=torch.int64).to(torch.int32)
    assert [value & 0xFFFFFFFF for value in _hash_(bits).tolist()] == list(map(_hashed, numbers))


def test_what_is_no_number_stays() -> None:
    of_gpus = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, 0.0])
    values[6] = of_gpus
    result = rounded(values, 1)
    assert result[:2].tolist() == [torch.inf, -torch.inf]
    assert result[[2, 6]].isnan().all()
    assert result[3:6].abs().max() < 1e-38


def steps(
    make: type[FusedOptimizer], keys: dict[str, Any], dtype: torch.dtype, in_backward: bool
) -> list[Tensor]:
    """Parameters after updates of a small regression; in the middle another optimizer goes on from the state."""
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(64, 96, generator=draw)
    targets = inputs @ torch.randn(96, 48, generator=draw)
    weight, bias = nn.Parameter(torch.zeros(96, 48, dtype=dtype)), nn.Parameter(torch.zeros(48))
    parameters, state = [weight, bias], None
    for number in range(40):
        if number % 20 == 0:
            optimizer = make(parameters, learning_rate=0.01, rounding_seed=4, **keys)
            if state is not None:
                optimizer.state.update(state)
        loss = (inputs @ weight.float() + bias - targets).square().mean()
        if in_backward:
            updates = BackwardUpdates(optimizer, "value", 1.0)
            with updates.running():
                loss.backward()
            updates.finish()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.clip_and_step("value", 1.0)
        state = optimizer.state
    return [weight.detach(), bias.detach(), loss.detach()]


@pytest.mark.parametrize(("make", "keys"), KINDS, ids=str)
def test_parameters_in_bfloat16_learn_as_in_float32(make: type[FusedOptimizer], keys: dict[str, Any]) -> None:
    weight, _, loss = steps(make, keys, torch.bfloat16, False)
    exact, _, exact_loss = steps(make, keys, torch.float32, False)
    assert weight.dtype == torch.bfloat16
    assert float(loss) == pytest.approx(float(exact_loss), rel=0.05)
    assert (weight.float() - exact).abs().mean() < 0.05 * exact.abs().mean()
    again, _, _ = steps(make, keys, torch.bfloat16, True)
    assert weight.equal(again)


def test_small_updates_add_up() -> None:
    """A hundred updates of a 16th of a unit in the last place; rounded to nearest all would be lost."""
    weight = nn.Parameter(torch.ones(128, 64, dtype=torch.bfloat16))
    optimizer = FusedOptimizer([weight], name="sgd", learning_rate=2.0**-12)
    for _ in range(100):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    assert float(weight.float().mean()) == pytest.approx(1.0 + 100 * 2.0**-12, rel=2e-4)
    assert len(weight.unique()) > 3
    assert optimizer.state[weight]["step"] == 100.0
