from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from econmt_ops.optimizers import fused as module
from econmt_ops.optimizers.eight_bit import EightBitOptimizer
from econmt_ops.optimizers.fused import FusedOptimizer

KINDS: list[dict[str, Any]] = [
    {"name": "sgd"},
    {"name": "sgd", "weight_decay": 0.1},
    {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
    {"name": "nag", "momentum": 0.8, "weight_decay": 0.01},
    {"name": "adam", "weight_decay": 0.01},
    {"name": "adamw", "betas": (0.8, 0.95), "weight_decay": 0.1},
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def make(parameters: list[nn.Parameter], **keys: Any) -> FusedOptimizer:
    return FusedOptimizer(parameters, **{"name": "sgd", "learning_rate": 0.5, **keys})


def rows_only(gradient: Tensor, rows: Tensor, coalesced: bool = True) -> Tensor:
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), gradient[rows], gradient.shape, is_coalesced=coalesced, check_invariants=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("keys", KINDS, ids=str)
@pytest.mark.parametrize("bytes_at_once", [1, 4096, 1 << 20])
def test_a_sparse_gradient_is_a_dense_one_with_zeros(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], dtype: torch.dtype, bytes_at_once: int
) -> None:
    """In every step other rows, in blocks of 1 row, of some, and of all; rows without a gradient move too.

    In bfloat16 to the bit: values are rounded alike.
    """
    monkeypatch.setattr(module, "BLOCK_BYTES", bytes_at_once)
    draw = torch.Generator().manual_seed(5)
    start = [torch.randn(70, 16, generator=draw, dtype=dtype), torch.randn(9, generator=draw, dtype=dtype)]
    runs = [[nn.Parameter(part.clone()) for part in start] for _ in range(2)]
    optimizers = [make(run, **keys) for run in runs]
    near = {"rtol": 0.0, "atol": 0.0} if dtype == torch.bfloat16 else {}
    for step in range(5):
        rows = torch.randperm(70, generator=draw)[: (3, 40, 1, 0, 70)[step]].sort().values
        gradient = torch.randn(70, 16, generator=draw, dtype=dtype)
        bias = torch.randn(9, generator=draw, dtype=dtype)
        dense = torch.zeros_like(gradient).index_copy(0, rows, gradient[rows])
        for (matrix, vector), given in zip(runs, (rows_only(gradient, rows), dense), strict=True):
            matrix.grad, vector.grad = given, bias.clone()
        kind = ("norm", "value", "norm", "norm", "none")[step]
        norms = [optimizer.clip(kind, 2.0 if kind == "norm" else 0.5) for optimizer in optimizers]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other, before in zip(*runs, start, strict=True):
        torch.testing.assert_close(one, other, **near)
        assert not torch.equal(one, before)
    for part, other in zip(*runs, strict=True):
        mine, theirs = optimizers[0].state.get(part, {}), optimizers[1].state.get(other, {})
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], **near)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2]], ids=["none", "of one word twice"])
def test_rows_that_repeat_or_are_in_no_order_are_summed(order: list[int]) -> None:
    matrix = nn.Parameter(torch.zeros(5, 2))
    optimizer = make([matrix], learning_rate=1.0)
    places, values = torch.tensor([[3, 1, 3]]), torch.tensor([[1.0, 2.0], [30.0, 40.0], [5.0, 6.0]])
    places, values = places[:, order], values[order]
    matrix.grad = torch.sparse_coo_tensor(places, values, (5, 2), check_invariants=False)
    expected = torch.tensor([30.0, 40.0, 6.0, 8.0])
    assert float(optimizer.clip("none", 1.0)) == pytest.approx(float(expected.norm()))
    optimizer.step()
    assert torch.equal(matrix[[1, 3]].flatten(), -expected)
    assert float(matrix.detach().abs().sum()) == float(expected.sum())


class Largest(TorchDispatchMode):
    """Notes how many values the largest tensor has that an operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in dense_tensors(args)}
        result = func(*args, **(kwargs or {}))
        for tensor in dense_tensors([result]):
            if tensor.untyped_storage()._cdata not in given:
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def dense_tensors(values: Any) -> list[Tensor]:
    """The dense tensors in nested lists."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def test_nothing_large_is_made_for_a_sparse_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    matrix = nn.Parameter(torch.ones(1000, 8))
    optimizer = make([matrix], name="adam")
    moments = {name: torch.ones(1000, 8) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[matrix] = {"step": torch.zeros(()), **moments}
    matrix.grad = rows_only(torch.ones(1000, 8), torch.tensor([2, 500]))
    with Largest() as seen:
        optimizer.clip("norm", 0.1)
        optimizer.step()
    assert 4096 // 4 <= seen.size < 1500
    assert float((matrix != 1.0).sum()) == 8000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", KINDS, ids=str)
@pytest.mark.parametrize("factor", [0.5, 1.0 - 1e-7, 1.0, 1.0 + 1e-6, 2.0])
def test_bounding_the_norm_is_that_of_torch(factor: float, keys: dict[str, Any], device: str) -> None:
    draw = torch.Generator().manual_seed(3)
    gradients = [torch.randn(size, generator=draw).to(device) for size in (7, 100, 1)]
    gradients[1] *= factor
    bound = 10.0
    runs = [[nn.Parameter(torch.ones(size, device=device)) for size in (7, 100, 1, 3)] for _ in range(2)]
    optimizers = [make(run, **keys) for run in runs]
    for _ in range(3):
        for run in runs:
            for parameter, gradient in zip(run, gradients, strict=False):
                parameter.grad = gradient.clone()
        norm = optimizers[0].clip("norm", bound)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(runs[1], bound))
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(*runs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
            if one.grad is not None and not (one.is_cuda and keys["name"].startswith("adam")):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0.0)
    assert not torch.equal(runs[0][0], torch.ones(7, device=device))
    assert torch.equal(runs[0][3], torch.ones(3, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_that_is_no_number_is_handed_out_and_not_hidden(device: str) -> None:
    for wrong in (math.inf, math.nan):
        parameter = nn.Parameter(torch.zeros(2, device=device))
        parameter.grad = torch.tensor([wrong, 1.0], device=device)
        optimizer = make([parameter])
        assert not math.isfinite(float(optimizer.clip("norm", 1.0)))
        optimizer.step()
        finite = torch.isfinite(parameter)
        assert not bool(finite.any() if math.isnan(wrong) else finite.all())


@pytest.mark.parametrize("lacking", ["exp_avg", "exp_avg_sq", "step"])
def test_what_a_state_lacks_is_added_to_what_it_has(lacking: str) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = make([parameter], name="adam")
    had = {"exp_avg": torch.full((3,), 2.0), "exp_avg_sq": torch.full((3,), 3.0), "step": torch.tensor(7.0)}
    optimizer.state[parameter] = {name: value for name, value in had.items() if name != lacking}
    optimizer.prepare()
    found = optimizer.state[parameter]
    assert found.keys() == had.keys()
    for name, value in found.items():
        assert torch.equal(value, torch.zeros_like(value) if name == lacking else had[name])


def test_a_bound_holds_for_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = make([parameter], learning_rate=1.0)

    def step(*kinds: str, forget: bool = False) -> list[float]:
        parameter.data.zero_()
        parameter.grad = torch.tensor([3.0, 4.0])
        for kind in kinds:
            assert float(optimizer.clip(kind, 0.5)) == pytest.approx(5.0)
        if forget:
            optimizer.zero_grad()
            parameter.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
        return [round(value, 4) for value in parameter.tolist()]

    assert step("norm") == [-0.3, -0.4]
    assert step() == [-3.0, -4.0]
    assert step("norm", "none") == [-3.0, -4.0]
    assert step("norm", forget=True) == [-3.0, -4.0]
    assert step("value") == [-0.5, -0.5]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", KINDS, ids=str)
@pytest.mark.parametrize("kind", ["none", "value", "norm"])
def test_clipping_and_stepping_at_once_is_one_after_the_other(
    kind: str, keys: dict[str, Any], device: str
) -> None:
    runs = [[nn.Parameter(torch.ones(size, device=device)) for size in (7, 100)] for _ in range(2)]
    optimizers = [make(run, **keys) for run in runs]
    for number in range(3):
        for run in runs:
            for parameter in run:
                parameter.grad = torch.linspace(-2.0, 3.0 + number, len(parameter), device=device)
        norm = optimizers[0].clip_and_step(kind, 0.5)
        expected = optimizers[1].clip(kind, 0.5)
        optimizers[1].step()
        torch.testing.assert_close(norm, expected)
        for one, other in zip(*runs, strict=True):
            assert one.equal(other)


def test_within_the_bound_nothing_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    kernel = torch._fused_sgd_

    def noted(*lists: Any, **options: Any) -> None:
        given.append(options["grad_scale"])
        kernel(*lists, **options)

    monkeypatch.setattr(torch, "_fused_sgd_", noted)
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = make([parameter])
    for bound in (5.1, 4.9):
        parameter.grad = torch.tensor([3.0, 4.0])
        optimizer.clip("norm", bound)
        optimizer.step()
    assert given[0] is None
    assert float(given[1]) == pytest.approx(5.0 / 4.9)


@pytest.mark.cuda
def test_clipping_does_not_wait_for_a_gpu() -> None:
    parameter = nn.Parameter(torch.zeros(5, device="cuda"))
    optimizer = make([parameter], name="adam")
    parameter.grad = torch.ones(5, device="cuda")
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.clip("norm", 0.5)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_a_rate_may_be_a_tensor(keys: dict[str, Any], device: str) -> None:
    """0.5 and 0.125 have no more bits than float32 holds, so the steps are the same bit for bit."""
    runs = [[nn.Parameter(torch.ones(size, device=device)) for size in (7, 100)] for _ in range(2)]
    rate = torch.tensor(0.5, device=device)
    optimizers = [make(runs[0], **keys), make(runs[1], **keys, learning_rate=rate)]
    for wanted in (0.5, 0.125, 0.125):
        for run, optimizer in zip(runs, optimizers, strict=True):
            optimizer.set_learning_rate(wanted)
            for number, parameter in enumerate(run):
                parameter.grad = torch.full_like(parameter, number + 0.5)
            optimizer.step()
        for one, other in zip(*runs, strict=True):
            assert one.equal(other)
    assert optimizers[1].param_groups[0]["lr"] is rate
    assert optimizers[0].param_groups[0]["lr"] == 0.125


def test_state_made_beforehand_is_that_of_the_first_step() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)]
    early, late = make(parameters, name="adam"), make(parameters, name="adam")
    early.prepare()
    assert early.state.keys() == {parameters[0]}
    made = dict(early.state[parameters[0]])
    parameters[0].grad = torch.ones(3)
    late.step()
    assert late.state[parameters[0]].keys() == made.keys()
    early.step()
    assert all(early.state[parameters[0]][name] is tensor for name, tensor in made.items())


@pytest.mark.cuda
@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_steps_in_a_graph_are_those_outside(keys: dict[str, Any]) -> None:
    """Clipping, rates and step counts change from replay to replay."""
    sizes, rates = (7, 1000, 3), (0.5, 0.25, 0.1)
    runs = [[nn.Parameter(torch.ones(size, device="cuda")) for size in sizes] for _ in range(2)]
    optimizers = [make(run, **keys, learning_rate=torch.tensor(0.5, device="cuda")) for run in runs]
    draw = torch.Generator("cuda").manual_seed(4)
    gradients = [[torch.randn(size, device="cuda", generator=draw) for size in sizes] for _ in rates]
    for run, optimizer in zip(runs, optimizers, strict=True):
        for parameter in run:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_norm = optimizers[0].clip("norm", 20.0)
        optimizers[0].step()
    for rate, given in zip(rates, gradients, strict=True):
        for run, optimizer in zip(runs, optimizers, strict=True):
            optimizer.set_learning_rate(rate)
            for parameter, gradient in zip(run, given, strict=True):
                parameter.grad.copy_(gradient)
        graph.replay()
        norm = optimizers[1].clip("norm", 20.0)
        optimizers[1].step()
        assert captured_norm.equal(norm)
        for one, other in zip(*runs, strict=True):
            assert one.equal(other)
    assert not runs[0][0].equal(torch.ones(7, device="cuda"))


@pytest.mark.cuda
def test_a_graph_makes_no_state() -> None:
    parameter = nn.Parameter(torch.zeros(2, device="cuda"))
    parameter.grad = torch.ones(2, device="cuda")
    optimizer = make([parameter], name="adam")
    refused = pytest.raises(RuntimeError, match=r"call prepare\(\) before")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_gradients_can_be_made_dense() -> None:
    matrix, other = nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.zeros(3))
    optimizer = make([matrix, other])
    matrix.grad = rows_only(torch.arange(4.0).unsqueeze(1), torch.tensor([1, 3]))
    optimizer.make_dense()
    assert other.grad is None
    assert matrix.grad.layout == torch.strided
    assert matrix.grad.flatten().tolist() == [0.0, 1.0, 0.0, 3.0]


def test_a_norm_may_be_that_of_gradients_elsewhere() -> None:
    parameters = [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    optimizer = FusedOptimizer(parameters, name="sgd", learning_rate=1.0)
    rows = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    parameters[0].grad = torch.sparse_coo_tensor(torch.tensor([[2, 0]]), rows, (4, 2))
    parameters[2].grad = torch.tensor([0.0, 12.0])
    torch.testing.assert_close(optimizer.norms(), torch.tensor([5.0, 0.0, 12.0]))
    assert float(optimizer.clip("norm", 1.0)) == pytest.approx(13.0)
    assert float(optimizer.clip("norm", 1.0, torch.tensor(24.0))) == 24.0
    optimizer.step()
    assert float(parameters[2][1]) == pytest.approx(-0.5, rel=1e-6)


ORDERS = {
    "transposed": ((80, 70), lambda part: part.t().contiguous().t()),
    "channels-last": ((64, 16, 3, 3), lambda part: part.to(memory_format=torch.channels_last)),
    "with-gaps": ((80, 70), lambda part: part.repeat_interleave(2, 1)[:, ::2]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["nag", "adam", "adam8bit"])
def test_the_order_of_values_in_memory_does_not_matter(
    order: str, dtype: torch.dtype, name: str, device: str
) -> None:
    """Parameters, gradients or both in another order than row by row, as `Module.to(memory_format=...)` makes them."""
    shape, reorder = ORDERS[order]
    draw = torch.Generator().manual_seed(3)
    start, gradient = (torch.randn(shape, generator=draw).to(device, dtype) for _ in range(2))
    kind = EightBitOptimizer if name == "adam8bit" else FusedOptimizer

    def run(values: Tensor, gradient: Tensor) -> Tensor:
        parameter = nn.Parameter(values)
        optimizer = kind([parameter], name=name, learning_rate=0.1, momentum=0.9)
        for _ in range(2):
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    wanted = run(start.clone(), gradient)
    assert (wanted != start).double().mean() > 0.9
    for values, incoming in (
        (reorder(start.clone()), gradient),
        (start.clone(), reorder(gradient)),
        (reorder(start.clone()), reorder(gradient)),
    ):
        torch.testing.assert_close(run(values, incoming), wanted)


@pytest.mark.parametrize("kind", [FusedOptimizer, EightBitOptimizer])
def test_a_graph_from_before_a_step_is_refused(kind: type[FusedOptimizer], device: str) -> None:
    """As with the unfused optimizers of torch: a backward pass would mix old and new values."""
    for name in kind.names:
        for dtype in (torch.float32, torch.bfloat16):
            parameter = nn.Parameter(torch.ones(80, 70, device=device, dtype=dtype))
            optimizer = kind([parameter], name=name, learning_rate=0.1)
            loss = parameter.square().sum()
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("name", ["sgd", "nag"])
def test_float16_is_updated_like_float32(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    start, gradient = (torch.randn(100, generator=draw).half() for _ in range(2))
    found = []
    for dtype in (torch.float16, torch.float32):
        parameter = nn.Parameter(start.to(dtype, copy=True))
        optimizer = make([parameter], name=name, momentum=0.9, weight_decay=0.1)
        for _ in range(3):
            parameter.grad = gradient.to(dtype)
            optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(found[0], found[1].half(), rtol=0.0, atol=1e-2)


WEIGHT = nn.Parameter(torch.ones(2, 3))


def test_arguments_that_would_train_wrongly_are_refused() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], {"name": "adam3"}, "name must be one of sgd, nag, adam, adamw, got 'adam3'"),
        (WEIGHT, {}, r"parameters must be leaf tensors, .*, got one tensor; write \[tensor\]"),
        ([WEIGHT, {"params": []}], {}, r"parameters\[1\] is a value of type dict"),
        ([WEIGHT * 2.0], {}, r"parameters\[0\], a tensor of shape \(2, 3\), is the result of an operation"),
        ([WEIGHT, WEIGHT], {}, "listed twice"),
        ([WEIGHT], {"learning_rate": -0.1}, "learning_rate must be at least 0, got -0.1"),
        ([WEIGHT], {"eps": math.nan}, "eps must be at least 0, got nan"),
        ([WEIGHT], {"betas": (0.9, 1.0)}, r"betas must be at least 0 and less than 1, got \(0.9, 1.0\)"),
    ]
    for parameters, keys, message in cases:
        with pytest.raises(ValueError, match=f"FusedOptimizer: .*{message}"):
            FusedOptimizer(parameters, **{"name": "sgd", "learning_rate": 0.5, **keys})


def test_an_unknown_way_to_clip_is_refused() -> None:
    optimizer = make([nn.Parameter(torch.ones(3))])
    for call in (optimizer.clip, optimizer.clip_and_step):
        with pytest.raises(ValueError, match="kind must be norm, value or none, got 'values'"):
            call("values", 1.0)
