"""Every schedule of the LSTM gives the reference's values and gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt_ops import bidirectional_lstm, lstm
from econmt_ops.core.gemm import LAYOUTS, Product, add_rows
from econmt_ops.lstm import recompute, together, wavefront
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


def both_ways(directions: str, size: SimpleNamespace, full: bool, device: str = "cpu", **others: str) -> None:
    """A layer in both directions equals the reference, down to the gradients of its last states."""
    make = Make(device, torch.float64)
    tensors = {
        "inputs": make(size.B, size.T, size.I),
        "forward": make.layer(size.I, size.H),
        "backward": make.layer(size.I, size.H),
    }
    lengths = None if full else torch.linspace(size.T, 0, size.B).round().long()
    schedule = Schedule(directions=directions, **others)

    def scheduled(**given: Any) -> Any:
        return recompute.bidirectional_lstm(**given, lengths=lengths, stash="gates", schedule=schedule)

    def reference(**given: Any) -> Any:
        return bidirectional_lstm(**given, lengths=lengths, implementation="reference")

    values, gradients = values_and_gradients(reference, tensors)
    found, found_gradients = values_and_gradients(scheduled, tensors)
    assert_close(found, values, 1e-11)
    assert_close(found_gradients, gradients, 1e-11)


@pytest.mark.parametrize("small", [True, False], ids=["batched", "products"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
@SIZES
def test_directions_together(
    size: SimpleNamespace, full: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "_SMALL", 1 << 18 if small else 0)
    monkeypatch.setattr(
        "econmt_ops.core.chunks._BLOCK_BYTES", 8 * 2 * size.B * 4 * size.H
    )  # blocks of two steps
    both_ways("together", size, full)
    both_ways("together", size, full, weights="row")


def test_the_directions_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batched product a step, forward and back, instead of two; not where less than the gates is kept."""
    calls: list[int] = []
    bmm = torch.bmm

    def counted(*arguments: Any, **others: Any) -> Any:
        calls.append(len(arguments[0]))
        return bmm(*arguments, **others)

    monkeypatch.setattr(together.torch, "bmm", counted)
    size = SimpleNamespace(B=2, T=4, I=3, H=5)
    both_ways("together", size, False)
    assert calls == [2] * (2 * 4)
    both_ways("apart", size, False)
    make = Make("cpu")
    layers = [make.layer(3, 5) for _ in range(2)]
    recompute.bidirectional_lstm(
        make(2, 4, 3), *layers, lengths=None, stash="cells", schedule=Schedule(directions="together")
    )
    assert len(calls) == 2 * 4


def test_directions_together_compiled() -> None:
    size = SimpleNamespace(B=3, T=3, I=4, H=8)
    both_ways("together", size, False, pointwise="compiled")


@pytest.mark.cuda
@pytest.mark.parametrize("directions", ["together", "streams"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
def test_directions_on_a_gpu(directions: str, full: bool) -> None:
    """Again and again: what one stream gives back too early the other one overwrites."""
    for _ in range(5):
        both_ways(directions, SimpleNamespace(B=64, T=30, I=32, H=64), full, "cuda")


@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
def test_opcheck_of_directions(full: bool) -> None:
    make = Make("cpu", torch.float32)
    inputs, layers = make(3, 4, 2), [make.layer(2, 5) for _ in range(2)]
    lists = [[layer[part] for layer in layers] for part in range(3)]
    lists += [[make(3, 5) for _ in range(2)] for _ in range(2)]
    lengths = None if full else torch.tensor([4, 1, 2])
    rest = (lengths, None, [False, True], "gates", Schedule(directions="together").text, True)
    torch.library.opcheck(torch.ops.econmt_ops.lstm_layer.default, (inputs, *lists, *rest))


def test_unknown_schedule() -> None:
    for schedule in (Schedule("compiled", "row", "wavefront"), Schedule(directions="streams")):
        assert Schedule.parse(schedule.text) == schedule
    with pytest.raises(
        ValueError, match=r"unknown schedule 'in-place/packed'; it must be in-place\|compiled"
    ):
        Schedule.parse("in-place/packed")
    with pytest.raises(ValueError, match="unknown schedule 'in-place/packed/diagonal/apart'"):
        Schedule.parse("in-place/packed/diagonal/apart")


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


@pytest.mark.parametrize("calls", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_of_a_larger_matrix_are_laid_out_first(dtype: torch.dtype, calls: int) -> None:
    # oneDNN would take a thousand times as long with them; of a strided bias it would add other numbers.
    whole, left = torch.randn(6, 9).to(dtype), torch.randn(4, 5).to(dtype)
    weight, bias = whole[:, 2:7], torch.randn(12).to(dtype)[::2]
    product = Product(weight, bias, calls=calls)
    laid_out = product._weight
    assert laid_out.is_mkldnn or laid_out.is_contiguous() or laid_out.t().is_contiguous()
    expected = left.double() @ weight.double().t() + bias.double()
    assert_close([product(left)], [expected], 1e-5 if dtype == torch.float32 else 2e-2)
