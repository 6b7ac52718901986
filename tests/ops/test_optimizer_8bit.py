"""Moments of a byte a value, and stochastic rounding: right on average, repeated exactly, and what is learnt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt_ops.optimizers import fused as module
from econmt_ops.optimizers.eight_bit import (
    EightBitOptimizer,
    read_first,
    read_second,
    write_first,
    write_second,
)
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.optimizers.in_backward import BackwardUpdates
from econmt_ops.optimizers.stochastic_rounding import _hash_, _hashed, round_into, salt_of
from tests.ops.test_optimizer import DEVICES, Largest, rows_only


def turned(values: Tensor, turn: float, *, first: bool) -> tuple[Tensor, Tensor]:
    """What values (R, C) become between two steps, and their codes, in blocks of 256 columns at most."""
    codes = torch.full(values.shape, 77, dtype=torch.int8 if first else torch.uint8)
    scales = torch.full((len(values), -(-values.shape[1] // 256)), torch.nan)
    write, read = (write_first, read_first) if first else (write_second, read_second)
    write(values, codes, scales, torch.tensor(turn, dtype=torch.float64))
    return read(codes, scales), codes


@pytest.mark.parametrize("columns", [1, 256, 600])
@pytest.mark.parametrize("turn", [0.0, 1.0 - 2.0**-20, 123456.3])
def test_a_value_is_kept_to_an_eighth_of_itself(columns: int, turn: float) -> None:
    """However small beside the largest of its block, and whatever stands in other blocks; signs and zeros stay."""
    draw = torch.Generator().manual_seed(columns)
    values = torch.randn(5, columns, generator=draw)
    values[1] *= 1e-20
    values[2] = 0.0
    values[3, ::2] *= 1e-4
    values[4, ::3] = 0.0
    found, codes = turned(values, turn, first=True)
    least = 2.0**-16 / 0.93 * values.abs().amax(1, keepdim=True)
    assert ((found - values).abs() <= 0.126 * (values.abs() + least)).all()
    assert (found[values == 0.0] == 0.0).all()
    assert columns == 1 or ((found - values).abs() > 0.01 * values.abs()).any()
    assert not (found * values < 0.0).any()
    assert codes.abs().max() <= 127
    squares = values.double().square().float()
    found, _ = turned(squares, turn, first=False)
    least = 2.0**-32 / 0.93 * squares.amax(1, keepdim=True)
    assert ((found - squares).abs() <= 0.126 * squares + least)[[0, 2, 3, 4]].all()
    if columns > 1:
        assert (found[4] > 0.0).all()
        assert (found[4][squares[4] == 0.0] <= 1e-9 * squares[4].max()).all()


@pytest.mark.parametrize("first", [True, False])
def test_what_is_rounded_off_is_made_up_for(first: bool) -> None:
    """The mean over the turns that steps take is the value."""
    values = torch.linspace(0.01, 1.0, 256).unsqueeze(0)
    golden = (5.0**0.5 - 1.0) / 2.0
    every = torch.stack([turned(values, step * golden, first=first)[0] for step in range(1, 90)])
    assert (every.amax(0) / every.amin(0)).median() > 1.05
    torch.testing.assert_close(every.mean(0), values, rtol=6e-3, atol=0.0)


def make(start: list[Tensor], name: str, **keys: Any) -> tuple[list[nn.Parameter], FusedOptimizer]:
    parameters = [nn.Parameter(part.clone()) for part in start]
    kind = EightBitOptimizer if name in EightBitOptimizer.names else FusedOptimizer
    return parameters, kind(parameters, name=name, **{"learning_rate": 0.01, **keys})


@pytest.mark.parametrize("name", ["adam", pytest.param("adamw", marks=pytest.mark.thorough)])
def test_moments_follow_those_of_float32(name: str) -> None:
    """Gradients of columns from 1 to 1/1000 that get smaller on the way: the second moment follows, and updates too."""
    draw = torch.Generator().manual_seed(4)
    start = [torch.randn(16, 256, generator=draw)]
    keys = {"betas": (0.9, 0.99), "weight_decay": 0.01, "learning_rate": 1e-5}
    (exact, theirs), (mine, ours) = make(start, name, **keys), make(start, f"{name}8bit", **keys)
    size = torch.logspace(-3, 0, 256)
    for step in range(400):
        gradient = (torch.randn(16, 256, generator=draw) + 0.3) * size * (1.0 if step < 200 else 0.2)
        exact[0].grad, mine[0].grad = gradient, gradient.clone()
        for each in (theirs, ours):
            each.clip("norm", 10.0)
            each.step()
        torch.testing.assert_close(mine[0].grad, exact[0].grad)
    state = ours.state[mine[0]]
    found = read_second(state["exp_avg_sq"], state["exp_avg_sq_scale"])
    wrong = (found / theirs.state[exact[0]]["exp_avg_sq"]).log()
    assert wrong.mean().abs() < 0.1
    assert wrong.std() < 0.25
    moved, wanted = mine[0].detach() - start[0], exact[0].detach() - start[0]
    assert (moved - wanted).norm() < 0.07 * wanted.norm()
    assert int(state["step"]) == 400
    float32 = sum(part.nbytes for part in theirs.state[exact[0]].values())
    assert sum(part.nbytes for part in state.values()) < 0.26 * float32
    assert ours.moment_bytes(mine[0]) == sum(part.nbytes for part in state.values()) - 4


@pytest.mark.parametrize("bytes_at_once", [1, 4096, 1 << 20])
def test_rows_are_updated_a_few_at_a_time_and_with_sparse_gradients(
    monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
) -> None:
    """Bit for bit the same; vectors and small matrices are those of Adam."""
    draw = torch.Generator().manual_seed(5)
    start = [torch.randn(*shape, generator=draw) for shape in ((70, 300), (9,), (63, 65))]
    every = [make(start, "adam8bit"), make(start, "adam8bit"), make(start, "adam")]
    for step in range(4):
        rows = torch.randperm(70, generator=draw)[: (3, 0, 70, 20)[step]].sort().values
        gradients = [torch.randn(part.shape, generator=draw) for part in start]
        dense = torch.zeros_like(gradients[0]).index_copy(0, rows, gradients[0][rows])
        for number, (parameters, optimizer) in enumerate(every):
            monkeypatch.setattr(module, "BLOCK_BYTES", (bytes_at_once, 2 << 20, 2 << 20)[number])
            parameters[0].grad = dense.clone() if number else rows_only(gradients[0], rows)
            parameters[1].grad, parameters[2].grad = gradients[1].clone(), gradients[2].clone()
            optimizer.step()
    (mine, ours), (whole, others), (exact, _) = every
    for one, other in zip(mine, whole, strict=True):
        assert torch.equal(one, other)
        for name, value in ours.state[one].items():
            assert torch.equal(value, others.state[other][name]), name
    assert torch.equal(mine[1], exact[1])
    assert torch.equal(mine[2], exact[2])
    assert (mine[0] - exact[0]).norm() < 0.2 * (exact[0].detach() - start[0]).norm()


def test_no_float32_moment_of_a_whole_matrix_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    (matrix,), optimizer = make([torch.ones(300, 16)], "adamw8bit")
    optimizer.prepare()
    matrix.grad = torch.ones(300, 16)
    with Largest() as seen:
        optimizer.step()
    assert seen.size <= 1024


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_that_of_the_numbers_kept(device: str) -> None:
    """From the moments that are read, Adam's step in float64, also for values in it."""
    draw = torch.Generator().manual_seed(3)
    start = torch.randn(20, 300, generator=draw).to(device)
    for dtype in (torch.float32, torch.float64):
        (matrix,), optimizer = make([start.to(dtype)], "adam8bit", betas=(0.8, 0.95), eps=1e-6)
        for step in range(1, 4):
            gradient = torch.randn(20, 300, generator=draw).to(device, dtype)
            m = v = torch.zeros_like(start, dtype=torch.float64)
            if step > 1:
                state = optimizer.state[matrix]
                m = read_first(state["exp_avg"], state["exp_avg_scale"]).double()
                v = read_second(state["exp_avg_sq"], state["exp_avg_sq_scale"]).double()
            m, v = 0.8 * m + 0.2 * gradient, 0.95 * v + 0.05 * gradient.double() ** 2
            root = (v / (1 - 0.95**step)).sqrt() + 1e-6
            expected = matrix.detach().double() - 0.01 * m / (1 - 0.8**step) / root
            matrix.grad = gradient
            optimizer.step()
            torch.testing.assert_close(matrix.detach().double(), expected, rtol=1e-5, atol=1e-6)


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
