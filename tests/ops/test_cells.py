"""What cells promise beside equal results: what is kept for the backward pass, extreme gates, and shapes."""

from __future__ import annotations

import math

import pytest
import torch

import econmt_ops
from econmt_ops import GateWeights
from econmt_ops.backends import c as native
from econmt_ops.cells.lstm import LSTM
from tests.ops.cases import CELLS, SCANS, Sizes
from tests.ops.helpers import Make, assert_close
from tests.ops.test_recompute import stashed_bytes


@pytest.mark.parametrize("name", SCANS)
def test_stash_keeps_inputs_and_states_alone(name: str) -> None:
    case = CELLS[name]
    given = case.tensors(Make("cpu", torch.float32), Sizes(B=4, T=50, I=16, H=16, L=1))
    given["inputs"].requires_grad_()
    kept = stashed_bytes(lambda: case.op(**given, implementation="recompute", stash="outputs"), [])
    unit = 4 * 50 * 16 * 4
    weights = sum(part.numel() * 4 for layer in given["layers"] for part in layer)
    # The inputs and c; of a GILR-LSTM its surrogate too, which is kept as what is read and as a state.
    most = 4 if name == "gilr_lstm" else 2
    assert kept <= most * unit + weights + 4 * 16 * 4 * 4


def check_tiny_shares(implementation: str, device: str, dtype: torch.dtype, f: float, i: float) -> None:
    """Checks two steps of minLSTM, c = s c + (1 - s) u with u = 1, whose gates both are all but 0.

    Of two sums F and I far below 0, sigmoid(F) / (sigmoid(F) + sigmoid(I)) is sigmoid(F - I).
    """
    options = {"device": device, "requires_grad": True}
    bias = torch.tensor([1.0, f, i], dtype=dtype, **options)  # type: ignore[call-overload]
    exact = torch.promote_types(dtype, torch.float32)
    first = torch.full((1, 1), 0.25, dtype=exact, **options)  # type: ignore[call-overload]
    weights = GateWeights(torch.zeros(3, 1, dtype=dtype, device=device), bias)
    inputs = torch.ones(1, 2, 1, dtype=dtype, device=device)
    outputs, _ = econmt_ops.min_lstm(inputs, (weights,), state=((first,),), implementation=implementation)
    dbias, dfirst = torch.autograd.grad(outputs.sum(), (bias, first))

    share = 1 / (1 + math.exp(i - f))
    one = share * 0.25 + 1 - share
    two = share * one + 1 - share
    dshare = (one - 1 - 0.75 * share) - 0.75
    dsum = dshare * share * (1 - share)
    expected = [[one, two], [(1 - share) * (2 + share), dsum, -dsum], [share + share**2]]
    found = [part.flatten() for part in (outputs, dbias, dfirst)]
    wanted = [torch.tensor(part, dtype=torch.float64, device=device) for part in expected]
    assert_close(found, wanted, 1e-2 if dtype == torch.bfloat16 else 1e-6)


TINY_GATES = pytest.mark.parametrize(
    ("dtype", "f", "i"),
    [
        *((dtype, -80.0, -80.0) for dtype in (torch.float32, torch.bfloat16)),
        *((dtype, -95.0, -95.0) for dtype in (torch.float32, torch.bfloat16)),
        (torch.float32, -95.0, -94.0),
        (torch.float32, -70.5, -72.0),
        (torch.float32, -1e4, -1e4 - 2),
        (torch.float32, -1e13, -1e13),
        (torch.float64, -800.0, -799.0),
    ],
    ids=str,
)


@TINY_GATES
@pytest.mark.parametrize("implementation", ["reference", "recompute", "recompute without the C library"])
def test_min_lstm_divides_gates_too_small_for_a_float(
    implementation: str, dtype: torch.dtype, f: float, i: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, without = implementation.partition(" ")
    if without:
        monkeypatch.setattr(native, "serves", lambda _: False)
    check_tiny_shares(name, "cpu", dtype, f, i)


@pytest.mark.parametrize("implementation", ["reference", "recompute"])
def test_min_lstm_has_gates_that_are_closed_and_passes_nan_on(implementation: str) -> None:
    check_closed_gates(implementation, "cpu")


def check_closed_gates(implementation: str, device: str) -> None:
    """Checks minLSTM with sums of -inf, of very large numbers and of NaN under its gates."""
    inf = math.inf
    sums = torch.tensor(
        [[-inf, 0], [0, -inf], [-1e13, 2], [inf, inf], [-1e5, 1e5], [1e5, 1e5], [math.nan, 0], [0, math.nan]]
    )
    bias = torch.cat([torch.full((8, 1), 3.0), sums], 1).t().flatten().to(device)
    weights = GateWeights(torch.zeros(24, 1, device=device), bias)
    state = ((torch.full((1, 8), 5.0, device=device),),)
    inputs = torch.ones(1, 1, 1, device=device)
    outputs, _ = econmt_ops.min_lstm(inputs, (weights,), state=state, implementation=implementation)
    assert outputs.flatten()[:6].tolist() == [3, 5, 3, 4, 3, 4]
    assert outputs.flatten()[6:].isnan().all()


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize(("inputs", "hidden"), [(6, 6), (5, 7)])
def test_sizes_of_a_cell(name: str, inputs: int, hidden: int) -> None:
    """Shapes of the weights, and two operations for each value of a matrix."""
    case = CELLS[name]
    shapes = case.shapes(inputs, hidden)
    found = {
        tuple(cell.parameter_shapes(inputs, hidden).values()): cell.operations(inputs, hidden)
        for cell in (case.op.cells if name != "lstm" else (LSTM,))
        if cell.weights is case.weights
    }
    assert found[shapes] == 2 * sum(math.prod(shape) for shape in shapes if len(shape) > 1)
