"""The persistent LSTM against the definition in float64, in the interpreter a step a launch; and how it is parted."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

import econmt_ops
from econmt_ops import LSTMWeights
from econmt_ops.backends.triton import partition
from econmt_ops.backends.triton.partition import Partition
from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.lstm import persistent_layer, reference, triton
from econmt_ops.lstm.chunked import ChunkedLSTM
from econmt_ops.lstm.direction import LSTMArguments
from econmt_ops.products.stack import StackOptions
from tests.ops.simulated_gpu import simulated_gpu


@pytest.fixture(autouse=True)
def _no_plans(poisoned_memory: None) -> None:
    """Plans of other tests are forgotten; memory that nobody has written shows."""
    persistent_layer._PLANS.clear()


def _weights(hidden: int, size: int, device: str) -> LSTMWeights:
    made = [torch.randn(4 * hidden, size), torch.randn(4 * hidden, hidden) * 0.7, torch.randn(4 * hidden)]
    made[1] *= hidden**-0.5
    return LSTMWeights(*(part.to(device).requires_grad_() for part in made))


def _leaves(*parts: object) -> list[Tensor]:
    return list(chain.from_iterable(_leaves(*p) if isinstance(p, tuple) else [p] for p in parts))  # type: ignore[misc]


def _double(tree: object) -> object:
    if isinstance(tree, LSTMWeights):
        return LSTMWeights(*(_double(part) for part in tree))  # type: ignore[arg-type]
    if isinstance(tree, tuple):
        return tuple(_double(part) for part in tree)
    assert isinstance(tree, Tensor)
    return tree.detach().double().requires_grad_(tree.requires_grad)


def _compare(got: list[Tensor], want: list[Tensor], tolerance: float = 2e-5) -> None:
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.shape == theirs.shape
        error = float((ours.detach().double() - theirs.detach()).norm() / (theirs.detach().norm() + 1e-3))
        assert error < tolerance, (number, error)


def _gradients(results: list[Tensor], leaves: list[Tensor], seeds: list[Tensor]) -> list[Tensor]:
    given = [seed.to(result.dtype) for result, seed in zip(results, seeds, strict=True)]
    return list(torch.autograd.grad(results, leaves, given))


def _check(
    device: str,
    batch: int,
    steps: int,
    size: int,
    hidden: int,
    *,
    layers: int = 1,
    lengths: list[int] | None = None,
    reverse: bool = False,
    state: bool = False,
) -> None:
    torch.manual_seed(0)
    stack = tuple(_weights(hidden, size if number == 0 else hidden, device) for number in range(layers))
    inputs = torch.randn(batch, steps, size, device=device, requires_grad=True)
    first = tuple(
        tuple((torch.randn(batch, hidden, device=device) * state).requires_grad_(state) for _ in range(2))
        for _ in stack
    )
    rows = None if lengths is None else torch.tensor(lengths)
    options = StackOptions(rows, reverse, from_zero=not state)
    exact = [_double(inputs), _double(stack), _double(first)]
    outputs, last = reference.lstm(*exact, options)  # type: ignore[arg-type]
    want = _leaves(outputs, last)
    seeds = [torch.randn_like(part) for part in want]
    leaves = [part for part in _leaves(*exact) if part.requires_grad]
    want += _gradients(want, leaves, seeds)
    given = inputs
    if rows is not None:
        padding = torch.arange(steps, device=device) >= rows.to(device).unsqueeze(1)
        given = inputs.masked_fill(padding.unsqueeze(2), float("nan"))
    outputs, last = triton.lstm(given, stack, first, options)  # type: ignore[arg-type]
    got = _leaves(outputs, last)
    ours = [part for part in _leaves(inputs, stack, first) if part.requires_grad]
    got += _gradients(got, ours, seeds)
    if rows is not None:  # behind the NaN of the padding
        at = len(seeds)
        got[at] = got[at].masked_fill(padding.unsqueeze(2), 0.0)
    _compare(got, want)


@pytest.mark.parametrize(("hidden", "batch", "steps"), [(5, 3, 4), (24, 17, 2), (33, 1, 4), (24, 3, 1)])
def test_gradients(device: str, hidden: int, batch: int, steps: int) -> None:
    _check(device, batch, steps, 7, hidden)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_walk_in_either_direction(device: str, reverse: bool) -> None:
    _check(device, 3, 4, 7, 5, reverse=reverse)


@pytest.mark.parametrize("multiprocessors", [2, 24])
def test_on_a_small_gpu(device: str, multiprocessors: int) -> None:
    """With two multiprocessors in launches of one group of rows each."""
    with simulated_gpu(capability=(8, 6), multiprocessors=multiprocessors):
        found = partition.divide(35, 40, torch.float32, limits_of(torch.device(device)), back=True)
        assert found is not None
        assert found.split == 1
        assert found.parts(40) <= found.programs == multiprocessors
        _check(device, 35, 2, 7, 40, lengths=[2, 0, 1, *[2] * 32], reverse=True, state=True)


@pytest.mark.parametrize("together", [True, False])
def test_bidirectional(device: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    divide = partition.divide

    def divided(batch: int, hidden: int, *others: Any, **options: Any) -> Partition | None:
        found = divide(batch, hidden, *others, **options)
        if found is None or together:
            return found
        return found._replace(programs=found.parts(hidden) * found.groups(batch))

    monkeypatch.setattr(partition, "divide", divided)
    torch.manual_seed(0)
    ahead, back = _weights(6, 4, device), _weights(6, 4, device)
    inputs = torch.randn(3, 4, 4, device=device, requires_grad=True)
    lengths = torch.tensor([4, 1, 3])
    exact = [_double(part) for part in (inputs, ahead, back)]
    outputs, states = reference.bidirectional_lstm(*exact, lengths=lengths)  # type: ignore[arg-type]
    want = _leaves(outputs, states)
    seeds = [torch.randn_like(part) for part in want]
    want += _gradients(want, _leaves(*exact), seeds)
    outputs, states = triton.bidirectional_lstm(inputs, ahead, back, lengths=lengths)
    got = _leaves(outputs, states)
    got += _gradients(got, _leaves(inputs, ahead, back), seeds)
    _compare(got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("team", "rows"), [(2, 16), (4, 8)])
def test_teams_that_part_the_sum(device: str, monkeypatch: pytest.MonkeyPatch, team: int, rows: int) -> None:
    """As layers of 1,024 units do; here of two teams, the second with units that are not there."""
    ahead = Partition(16, 16, 4, 32, 132)
    back = Partition(16, rows, 4, 32, 132, 64 // (16 * team), rows > 8, team=team)
    monkeypatch.setattr(partition, "divide", lambda *_, back, ours=(ahead, back), **__: ours[back])
    hidden = 16 * team + 3
    _check(device, rows + 1, 2, 4, hidden, lengths=[2, 0, *[1] * (rows - 1)], reverse=True, state=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = _weights(6, 4, device)
    inputs = torch.randn(3, 4, 4, device=device).to(dtype).requires_grad_()
    exact = [_double(part) for part in (inputs, weights)]
    outputs, _ = econmt_ops.lstm(exact[0], (exact[1],), implementation="reference")  # type: ignore[arg-type]
    want = [outputs, *torch.autograd.grad(outputs.sum(), _leaves(*exact))]
    outputs, state = triton._run_layer(inputs, [weights], [], StackOptions(), [False], "gates", dtype)[:2]
    assert outputs.dtype == state.dtype == dtype
    got = [outputs, *torch.autograd.grad(outputs.float().sum(), _leaves(inputs, weights))]
    assert got[2].dtype == torch.float32
    _compare(got, want, 2e-2)


def test_float16_products_of_float32(device: str) -> None:
    """Gradients that float16 cannot hold are scaled into its range."""
    torch.manual_seed(0)
    weights = _weights(24, 4, device)
    inputs = torch.randn(9, 4, 4, device=device, requires_grad=True)
    exact = [_double(part) for part in (inputs, weights)]
    outputs, _ = econmt_ops.lstm(exact[0], (exact[1],), implementation="reference")  # type: ignore[arg-type]
    seed = torch.randn_like(outputs) * 1e-9
    want = [outputs, *(part * 1e9 for part in _gradients([outputs], _leaves(*exact), [seed]))]
    outputs, _, _ = triton._run_layer(inputs, [weights], [], StackOptions(), [False], "gates", torch.float16)
    got = [outputs, *(part * 1e9 for part in _gradients([outputs], _leaves(inputs, weights), [seed]))]
    _compare(got, want, 2e-3)


def test_the_operator_is_registered_as_torch_expects(device: str) -> None:
    torch.manual_seed(0)
    weights = _weights(5, 3, device)
    inputs = torch.randn(3, 2, 3, device=device, requires_grad=True)
    state = [torch.randn(2, 5, device=device, requires_grad=True) for _ in range(2)]
    lengths = torch.tensor([3, 1], device=device)
    parts = [[part] for part in (*weights, *state)]
    layer = LSTMArguments(inputs, *parts, lengths, None, [True], None, "cells", "persistent", torch.float32)
    torch.library.opcheck(triton._layer.forward, (*layer, True))


@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
def test_chunks_leave_their_weights_gradients_to_the_end(full: bool, device: str) -> None:
    torch.manual_seed(0)
    weights = _weights(5, 3, device)
    inputs = torch.randn(3, 5, 3, device=device, requires_grad=True)
    lengths = None if full else torch.tensor([5, 1, 3], device=device)
    outputs, (want_state,) = econmt_ops.lstm(inputs, (weights,), lengths=lengths, implementation="recompute")
    seed = torch.randn_like(outputs)
    want = _gradients([outputs], _leaves(inputs, weights), [seed])
    layer, state, parts = ChunkedLSTM(weights), None, []
    for begin in (0, 2, 4):
        read = inputs[:, begin : begin + 2]
        here = None if lengths is None else (lengths - begin).clamp(0, read.shape[1])
        made, state = layer(read, state, lengths=here, implementation="triton")
        parts.append(made)
    torch.cat(parts, 1).backward(seed)
    layer.backward()
    _compare([*parts, *(leaf.grad for leaf in _leaves(inputs, weights))], [*outputs.split(2, 1), *want], 1e-4)
    assert state is not None
    _compare(list(state), list(want_state), 1e-4)


def test_types_and_layers_without_a_launch_take_steps(device: str) -> None:
    weights = _weights(5, 3, device)
    inputs = torch.randn(2, 3, 3, device=device, dtype=torch.float64)
    zero = torch.zeros(2, 5, device=device, dtype=torch.float64)
    outputs, _ = triton.lstm(inputs, (weights,), ((zero, zero),), StackOptions(from_zero=True))
    exact = _double(weights)
    want, _ = econmt_ops.lstm(inputs, (exact,), implementation="reference")  # type: ignore[arg-type]
    torch.testing.assert_close(outputs, want)
    assert triton.products_type(inputs) is None
