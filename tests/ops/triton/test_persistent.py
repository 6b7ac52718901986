"""The persistent LSTM, and GRU, against the definition in float64, in the interpreter a step a launch; and how it is parted."""

from __future__ import annotations

from functools import partial
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
from econmt_ops.lstm import persistent_layer, triton
from econmt_ops.lstm.chunked import ChunkedLSTM
from econmt_ops.lstm.direction import LSTMArguments
from econmt_ops.products.stack import StackOptions
from tests.ops.cases import CASES, CELLS, Sizes
from tests.ops.checking import Variation, check
from tests.ops.helpers import Make, assert_close, assert_same_function, to, values_and_gradients
from tests.ops.simulated_gpu import simulated_gpu
from tests.ops.test_chunked_lstm import in_chunks


@pytest.fixture(autouse=True)
def _no_plans(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of other tests are forgotten; memory that nobody has written shows; a launch runs few steps of a GRU, too."""
    persistent_layer._PLANS.clear()
    monkeypatch.setattr(triton, "_LEAST_STEPS", 0)


EACH_CELL = pytest.mark.parametrize("cell", ["lstm", "gru"])


def _check(
    cell: str, device: str, sizes: Sizes, *, ragged: bool = False, reverse: bool = False, state: bool = False
) -> None:
    variation = Variation(sizes._replace(L=1), ragged, state, {"reverse": reverse})
    check(CASES[cell], variation, torch.float32, device, ["triton"])


def _compare(
    cell: str,
    device: str,
    sizes: Sizes,
    products: torch.dtype,
    most: float,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> None:
    """Compares a layer of float32 weights with the definition; the gradient of its outputs is scaled."""
    tensors = to(torch.float32, CELLS[cell].tensors(Make(device), sizes._replace(L=1)))
    given = {"inputs": tensors["inputs"].to(dtype), "weights": tensors["layers"][0]}

    def definition(inputs: Tensor, weights: Any) -> Tensor:
        outputs: Tensor = getattr(econmt_ops, cell)(inputs, (weights,), implementation="reference")[0]
        return outputs * scale

    def layer(inputs: Tensor, weights: Any) -> Tensor:
        if cell == "gru":
            outputs, (h,) = triton.gru(inputs, weights, inputs.new_zeros(sizes.B, sizes.H), None, products)
        else:
            outputs, h, _ = triton._run_layer(
                inputs, [weights], [], StackOptions(), [False], "gates", products
            )
        made = outputs, h
        assert {part.dtype for part in made} == {dtype}
        return made[0] * scale

    found, wanted = (
        [part.double() / scale for part in chain(*values_and_gradients(function, arguments))]
        for function, arguments in ((layer, given), (definition, to(torch.float64, given)))
    )
    assert_close(found, wanted, most)


@EACH_CELL
@pytest.mark.parametrize(("hidden", "batch", "steps"), [(5, 3, 4), (24, 17, 2), (33, 1, 4), (24, 3, 1)])
def test_gradients(cell: str, device: str, hidden: int, batch: int, steps: int) -> None:
    for reverse in (False, True) if hidden == 5 else (False,):
        _check(cell, device, Sizes(batch, steps, I=7, H=hidden), reverse=reverse)


@pytest.mark.parametrize("multiprocessors", [2, 24])
def test_on_a_small_gpu(device: str, multiprocessors: int) -> None:
    """With two multiprocessors in launches of one group of rows each."""
    with simulated_gpu(capability=(8, 6), multiprocessors=multiprocessors):
        found = partition.divide(35, 40, torch.float32, limits_of(torch.device(device)), back=True)
        assert found.split == 1
        assert found.parts(40) <= found.programs == multiprocessors
        _check("lstm", device, Sizes(35, 2, I=7, H=40), ragged=True, reverse=True, state=True)


@pytest.mark.parametrize("together", [True, False])
def test_bidirectional(device: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    divide = partition.divide

    def divided(batch: int, hidden: int, *others: Any, **options: Any) -> Partition | None:
        found = divide(batch, hidden, *others, **options)
        if found is None or together:
            return found
        return found._replace(programs=found.parts(hidden) * found.groups(batch))

    monkeypatch.setattr(partition, "divide", divided)
    lengths = torch.tensor([4, 1, 3])
    both = [
        partial(econmt_ops.bidirectional_lstm, lengths=lengths, implementation=name)
        for name in ("triton", "reference")
    ]
    tensors = CASES["bidirectional"].tensors(Make(device), Sizes(3, 4, I=4, H=6))
    assert_same_function(*both, tensors, torch.float32)


@EACH_CELL
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("team", "rows"), [(2, 16), (4, 8)])
def test_teams_that_part_the_sum(
    cell: str, device: str, monkeypatch: pytest.MonkeyPatch, team: int, rows: int
) -> None:
    """As layers of 1,024 units do; here of two teams, the second with units that are not there."""
    ahead = Partition(16, 16, 4, 32, 132)
    back = Partition(16, rows, 4, 32, 132, 64 // (16 * team), rows > 8, team=team)
    monkeypatch.setattr(partition, "divide", lambda *_, back, ours=(ahead, back), **__: ours[back])
    _check(cell, device, Sizes(rows + 1, 2, I=4, H=16 * team + 3), ragged=True, reverse=True, state=True)


@EACH_CELL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(cell: str, device: str, dtype: torch.dtype) -> None:
    _compare(cell, device, Sizes(3, 4, I=4, H=6), dtype, 2e-2, dtype)


@EACH_CELL
def test_float16_products_of_float32(cell: str, device: str) -> None:
    """Gradients that float16 cannot hold are scaled into its range."""
    for scale in (1e-30, 1e-9, 1e20):
        _compare(cell, device, Sizes(9, 4, I=4, H=24), torch.float16, 2e-3, torch.float32, scale)


def _leaves(device: str, steps: int) -> tuple[LSTMWeights, Tensor]:
    """The weights of a layer and its inputs."""
    make = Make(device, torch.float32)
    weights, inputs = make.layer(3, 5), make(3, steps, 3)
    for leaf in (*weights, inputs):
        leaf.requires_grad_()
    return weights, inputs


def test_the_operator_is_registered_as_torch_expects(device: str) -> None:
    weights, inputs = _leaves(device, 2)
    state = [torch.randn(2, 5, device=device, requires_grad=True) for _ in range(2)]
    lengths = torch.tensor([3, 1], device=device)
    parts = [[part] for part in (*weights, *state)]
    for gru, stash in ((False, "cells"), (True, "outputs")):
        settings = [not gru], None, stash, "persistent", torch.float32, gru
        layer = LSTMArguments(inputs, *parts, lengths, None, *settings)
        torch.library.opcheck(triton._layer.forward, (*layer, True))


@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
def test_chunks_leave_their_weights_gradients_to_the_end(full: bool, device: str) -> None:
    weights, inputs = _leaves(device, 5)
    lengths = None if full else torch.tensor([5, 1, 3], device=device)
    outputs, (want_state,) = econmt_ops.lstm(inputs, (weights,), lengths=lengths, implementation="recompute")
    seed = torch.randn_like(outputs)
    want = torch.autograd.grad(outputs, [inputs, *weights], seed)
    layer = ChunkedLSTM(weights)
    made, state = in_chunks({"inputs": inputs}, layer, 2, lengths, False, "triton")
    made.backward(seed)
    layer.backward()
    found = [made, *state, *(leaf.grad for leaf in (inputs, *weights) if leaf.grad is not None)]
    assert_close(found, [outputs, *want_state, *want], 1e-4)


def test_types_and_layers_without_a_launch_take_steps(device: str) -> None:
    weights, inputs = _leaves(device, 3)
    inputs = inputs.double()
    zero = torch.zeros(3, 5, device=device, dtype=torch.float64)
    outputs, _ = triton.lstm(inputs, (weights,), ((zero, zero),), StackOptions(from_zero=True))
    exact = to(torch.float64, weights)
    want, _ = econmt_ops.lstm(inputs, (exact,), implementation="reference")
    torch.testing.assert_close(outputs, want)
    assert triton.products_type(inputs.dtype) is None
