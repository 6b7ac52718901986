"""Every schedule of the LSTM gives the reference's values and gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt_ops import lstm
from econmt_ops.lstm import recompute, wavefront
from econmt_ops.lstm.products import LAYOUTS, Product, add_rows
from econmt_ops.lstm.schedule import ORDERS, Schedule
from tests.ops.helpers import Make, assert_close, each_size, to, values_and_gradients

SCHEDULES = [
    pytest.param(Schedule("in-place", weights, order), id=f"{weights}-{order}")
    for weights, order in itertools.product(LAYOUTS, ORDERS)
]
SIZES = each_size(
    {"B": 1, "T": 1, "I": 1, "H": 1, "L": 1},
    {"B": 2, "T": 1, "I": 3, "H": 5, "L": 3},
    {"B": 3, "T": 2, "I": 4, "H": 3, "L": 5},
    {"B": 3, "T": 7, "I": 2, "H": 5, "L": 4},
)


def arguments(size: SimpleNamespace, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    make = Make("cpu", dtype)
    return {
        "inputs": make(size.B, size.T, size.I),
        "layers": make.layers(size.I, size.H, size.L),
        "state": make.state(size.B, size.H, size.L),
    }


def options(size: SimpleNamespace, **others: Any) -> dict[str, Any]:
    lengths = torch.linspace(size.T, 0, size.B).round().long()
    return {
        "lengths": lengths,
        "reverse": False,
        "residual": False,
        "dropout": 0.0,
        "dropout_seed": 3,
        **others,
    }


def same(
    schedule: Schedule,
    tensors: dict[str, Any],
    others: dict[str, Any],
    variational: bool = False,
    tolerance: float = 1e-11,
    stash: str = "gates",
) -> None:
    def scheduled(**given: Any) -> Any:
        given["state"] = tuple(
            (h, c.to(c.dtype if c.dtype == torch.float64 else torch.float32)) for h, c in given["state"]
        )
        return recompute.lstm(**given, **others, variational=variational, schedule=schedule, stash=stash)

    def reference(**given: Any) -> Any:
        return lstm(**given, **others, variational=variational, implementation="reference")

    values, gradients = values_and_gradients(reference, tensors)
    found, found_gradients = values_and_gradients(scheduled, tensors)
    assert_close(found, values, tolerance)
    assert_close(found_gradients, gradients, tolerance)


@SIZES
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
def test_equals_reference(size: SimpleNamespace, schedule: Schedule, full: bool) -> None:
    others = options(size)
    same(schedule, arguments(size), {**others, "lengths": None} if full else others)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("variational", [False, True], ids=["each-step", "variational"])
def test_dropout_and_residual(schedule: Schedule, reverse: bool, variational: bool) -> None:
    size = SimpleNamespace(B=3, T=5, I=4, H=6, L=3)
    others = options(size, reverse=reverse, residual=True, dropout=0.4)
    same(schedule, arguments(size), others, variational)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_packed_types(schedule: Schedule, dtype: torch.dtype) -> None:
    """The types that oneDNN packs, against the reference in the same type."""
    size = SimpleNamespace(B=4, T=6, I=24, H=40, L=3)
    tensors = to(dtype, arguments(size))
    same(schedule, tensors, options(size), tolerance=2e-5 if dtype == torch.float32 else 8e-2)


@pytest.mark.parametrize("order", ORDERS)
def test_compiled(order: str) -> None:
    size = SimpleNamespace(B=3, T=3, I=4, H=8, L=2)
    same(
        Schedule("compiled", "packed", order),
        to(torch.float32, arguments(size)),
        options(size),
        tolerance=1e-5,
    )


def test_the_wavefront_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batched product a diagonal instead of one a cell; stash levels that keep less go layer by layer."""
    calls: list[int] = []
    bmm = torch.bmm

    def counted(*arguments: Any, **others: Any) -> Any:
        calls.append(len(arguments[0]))
        return bmm(*arguments, **others)

    monkeypatch.setattr(wavefront.torch, "bmm", counted)
    size = SimpleNamespace(B=2, T=4, I=3, H=5, L=3)
    same(Schedule(order="wavefront"), arguments(size), options(size))
    assert sum(calls) == 2 * 2 * 4
    assert len(calls) == 2 * (4 + 3 - 2)
    same(Schedule(order="wavefront"), arguments(size), options(size), stash="outputs")
    assert len(calls) == 2 * (4 + 3 - 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_product(layout: str, dtype: torch.dtype) -> None:
    make = Make("cpu", dtype)
    left, weight, bias = make(2, 3, 19), make(21, 19), make(21)
    for given in (None, bias):
        expected = left.double() @ weight.double().t() + (0 if given is None else given.double())
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        assert_close([Product(weight, given, layout)(left)], [expected], tolerance)


def test_add_rows() -> None:
    values = Make("cpu")(3, 4, 5)
    assert_close([add_rows(values)], [values.sum((0, 1))], 1e-13)


def test_unknown_schedule() -> None:
    assert Schedule.parse(Schedule("compiled", "row", "wavefront").text) == Schedule(
        "compiled", "row", "wavefront"
    )
    with pytest.raises(
        ValueError, match=r"unknown schedule 'in-place/packed'; it must be in-place\|compiled"
    ):
        Schedule.parse("in-place/packed")
    with pytest.raises(ValueError, match="unknown schedule 'in-place/packed/diagonal'"):
        Schedule.parse("in-place/packed/diagonal")


@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
def test_opcheck(full: bool) -> None:
    """Schema, autograd registration, FakeTensor and tracing of the wavefront's operator agree with what really runs."""
    size = SimpleNamespace(B=3, T=4, I=3, H=5, L=2)
    tensors = arguments(size, torch.float32)

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_()

    lists = [[leaf(layer[part]) for layer in tensors["layers"]] for part in range(3)]
    lists += [[leaf(pair[part]) for pair in tensors["state"]] for part in range(2)]
    lengths = None if full else torch.tensor([4, 1, 2])
    rest = (lengths, True, 0.3, 1, False, False, Schedule().text, True)
    torch.library.opcheck(torch.ops.econmt_ops.lstm_stack.default, (leaf(tensors["inputs"]), *lists, *rest))
