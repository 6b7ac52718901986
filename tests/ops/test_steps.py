"""The steps of each backend against the mathematics in `econmt_ops.cells.lstm`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from econmt_ops.backends import c as library
from econmt_ops.backends import steps_for
from econmt_ops.backends.c.steps import CSteps
from econmt_ops.backends.compiled import CompiledSteps
from econmt_ops.backends.eager import EagerSteps
from econmt_ops.backends.protocol import Read
from econmt_ops.cells import lstm
from econmt_ops.core.precision import accumulate_dtype

BACKENDS = [
    pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
    for backend, dtypes in (
        ("eager", (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        ("c", (torch.float32, torch.bfloat16)),
        ("compiled", (torch.float32, torch.bfloat16)),
    )
    for dtype in dtypes
]
ROWS, HIDDEN = 3, 5


def make(backend: str, dtype: torch.dtype) -> EagerSteps:
    like = torch.empty(0, dtype=dtype)
    if backend == "eager":
        return EagerSteps(like)
    steps = steps_for(like, "compiled" if backend == "compiled" else "eager")
    assert type(steps) is (CompiledSteps if backend == "compiled" else CSteps)
    return steps


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    bound = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    return {"rtol": bound, "atol": bound}


def values(*size: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    made = torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype)


def rows_of(tensor: Tensor) -> Tensor:
    """The same values as a slice of wider rows."""
    wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + 6), torch.nan)
    wide[:, 2:-4] = tensor
    return wide[:, 2:-4]


def laid(strided: bool, tensor: Tensor) -> Tensor:
    return rows_of(tensor) if strided else tensor.clone()


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), expected.double(), **tolerance(dtype))


def test_cell_lstm_is_differentiated_rightly() -> None:
    sums, c = values(ROWS, 4 * HIDDEN).requires_grad_(), values(ROWS, HIDDEN, seed=1).requires_grad_()
    dh, dc = values(ROWS, HIDDEN, seed=2), values(ROWS, HIDDEN, seed=3)
    h, after = lstm.forward(sums, c)
    expected = torch.autograd.grad([h, after], [sums, c], [dh, dc])
    parts, dbefore = lstm.update_state_backward(lstm.activate(sums), c, after, dh, dc)
    for one, other in zip((torch.cat(parts, 1), dbefore), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_sizes_of_the_cell() -> None:
    assert lstm.LSTM.parameter_shapes(7, 5) == {"input": (20, 7), "hidden": (20, 5), "bias": (20,)}
    assert lstm.LSTM.operations(7, 5) == 2 * 20 * 12


WAYS = [
    pytest.param(*backend.values, *way, id=f"{backend.id}-{way}")
    for backend in BACKENDS
    for way in itertools.product([False, True], repeat=3)
    # Each way is compiled anew.
    if backend.values[0] != "compiled" or way in ((False, True, False), (True, False, True))
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("backend", "dtype", "strided", "in_place", "split"), WAYS)
def test_forward_and_backward(
    backend: str, dtype: torch.dtype, strided: bool, in_place: bool, split: bool
) -> None:
    """``strided``: rows lie apart. ``in_place``: what may share memory does. ``split``: sums in two shares, two gradients of h."""
    exact = accumulate_dtype(dtype)
    sums, other = values(ROWS, 4 * HIDDEN, dtype=dtype), values(ROWS, 4 * HIDDEN, dtype=dtype, seed=1)
    before = values(ROWS, HIDDEN, dtype=exact, seed=2)
    dh, more = values(ROWS, HIDDEN, dtype=dtype, seed=3), values(ROWS, HIDDEN, dtype=dtype, seed=4)
    dc = values(ROWS, HIDDEN, dtype=exact, seed=5)
    total = (sums + other if split else sums).double()
    expected_h, expected_c = lstm.forward(total, before.double())
    flow = (dh.double() + more.double()) if split else dh.double()
    given = lstm.activate(total), before.double(), expected_c, flow, dc.double()
    parts, expected_dc = lstm.update_state_backward(*given)

    steps = make(backend, dtype)
    gates, c = laid(strided, sums), laid(strided, before)
    after = c if in_place else laid(strided, torch.full_like(before, torch.nan))
    h = [laid(strided, torch.full((ROWS, HIDDEN), torch.nan, dtype=dtype)) for _ in range(2 if split else 1)]
    steps.cell_forward(gates, c, after, h, keep=True, recurrent=laid(strided, other) if split else None)
    for written in h:
        check(written, expected_h, dtype)
    check(after, expected_c, dtype)

    dgates = gates if in_place else laid(strided, torch.full_like(sums, torch.nan))
    given, dc = [laid(strided, dh), *([laid(strided, more)] if split else [])], laid(strided, dc)
    steps.cell_backward(gates, laid(strided, before), after, given, dc, dgates)
    check(dgates, torch.cat(parts, 1), dtype)
    check(dc, expected_dc, dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_a_block_made_again(backend: str, dtype: torch.dtype) -> None:
    exact, count = accumulate_dtype(dtype), 4
    sums, first = values(count, ROWS, 4 * HIDDEN, dtype=dtype), values(ROWS, HIDDEN, dtype=exact, seed=1)
    states = [first.double()]
    for step in sums.double():
        states.append(lstm.forward(step, states[-1])[1])
    steps = make(backend, dtype)
    gates = steps.prepare_gates(sums.clone())
    cells = steps.scan_cells(gates, first)
    assert cells.dtype == exact
    check(cells, torch.stack(states), dtype)
    # The block before, as the forward pass has left it.
    kept, c = sums.clone(), first.clone()
    for step in kept:
        steps.cell_forward(step, c, c, [torch.empty(ROWS, HIDDEN, dtype=dtype)], keep=True)
    check(steps.scan_cells(kept, first), torch.stack(states), dtype)
    dh, dc = values(ROWS, HIDDEN, dtype=dtype, seed=2), values(ROWS, HIDDEN, dtype=exact, seed=3)
    parts, _ = lstm.update_state_backward(
        lstm.activate(sums[2].double()), states[2], states[3], dh.double(), dc.double()
    )
    expected = torch.cat(parts, 1)
    for given in (gates[2], kept[2]):
        dgates = torch.empty(ROWS, 4 * HIDDEN, dtype=dtype)
        steps.cell_backward(given, cells[2], cells[3], [dh], dc.clone(), dgates)
        check(dgates, expected, dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_what_the_layer_above_reads(backend: str, dtype: torch.dtype, residual: bool, dropped: bool) -> None:
    exact = accumulate_dtype(dtype)
    sums, before = values(ROWS, 4 * HIDDEN, dtype=dtype), values(ROWS, HIDDEN, dtype=exact, seed=1)
    more = values(ROWS, HIDDEN, dtype=dtype, seed=2) if residual else None
    keep = values(ROWS, HIDDEN, seed=3) > 0 if dropped else None
    h = torch.empty(ROWS, HIDDEN, dtype=dtype)
    places = [torch.empty(ROWS, HIDDEN, dtype=dtype), rows_of(torch.empty(ROWS, HIDDEN, dtype=dtype))]
    read = Read(places, more, keep, 1.25)
    make(backend, dtype).cell_forward(sums, before, torch.empty_like(before), [h], keep=False, read=read)
    expected = h if more is None else h + more
    expected = expected if keep is None else torch.where(keep, expected * 1.25, 0.0)
    for place in places:
        torch.testing.assert_close(place, expected)


def test_the_choice_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(steps_for(torch.empty(0))) is CSteps
    assert type(steps_for(torch.empty(0, dtype=torch.float64))) is EagerSteps
    assert type(steps_for(torch.empty(0), "compiled")) is CompiledSteps
    with library.without():
        assert type(steps_for(torch.empty(0))) is EagerSteps
    monkeypatch.setattr("econmt_ops.backends.compiled.is_available", lambda: False)
    assert type(steps_for(torch.empty(0), "compiled")) is CSteps
