"""Steps of every optimizer under a loss scale, and all ops in float16: gradients of float64, or an overflow seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import econmt_ops
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.optimizers.eight_bit import EightBitOptimizer
from econmt_ops.optimizers.fused import FusedOptimizer
from econmt_ops.optimizers.loss_scale import LossScale
from tests.ops.every_op import Call, calls, each_op
from tests.ops.helpers import TOLERANCE, Make, assert_close, differentiable, to

KINDS: list[dict[str, Any]] = [
    {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
    {"name": "nag", "momentum": 0.8},
    {"name": "adam", "weight_decay": 0.01},
    {"name": "adamw", "weight_decay": 0.1},
    {"name": "adam8bit"},
]
ROWS = torch.tensor([3, 40, 41])


def make(parameters: list[nn.Parameter], keys: dict[str, Any]) -> FusedOptimizer:
    kinds = (FusedOptimizer, EightBitOptimizer)
    rate = torch.tensor(0.5, device="cuda") if parameters[0].is_cuda else 0.5
    return next(kind for kind in kinds if keys["name"] in kind.names)(parameters, learning_rate=rate, **keys)


def run_of(device: str) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(device)) for shape in [(70, 64), (9,)]]


def give(run: list[nn.Parameter], seed: int, factor: float, *, sparse: bool = False) -> None:
    """Sets gradients that depend on the seed, times a factor."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in run:
        gradient = torch.randn(parameter.shape, generator=draw) * factor
        if sparse and parameter.dim() == 2:
            gradient = torch.sparse_coo_tensor(
                ROWS.unsqueeze(0), gradient[ROWS], gradient.shape, is_coalesced=True, check_invariants=False
            )
        if parameter.grad is None or sparse:
            parameter.grad = gradient.to(parameter.device)
        else:
            parameter.grad.copy_(gradient)


def everything(run: list[nn.Parameter], optimizer: FusedOptimizer) -> list[Tensor]:
    return [part.detach().clone() for part in (*run, *(x for p in run for x in optimizer.state[p].values()))]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_steps_are_those_without_a_scale(keys: dict[str, Any], sparse: bool) -> None:
    """Bit for bit, however gradients are clipped; a step between them that overflows leaves no trace."""
    runs = [run_of("cpu"), run_of("cpu")]
    scaled, plain = optimizers = [make(run, keys) for run in runs]
    scale = scaled.loss_scale = LossScale(torch.device("cpu"), 2.0**12, window=100)
    for number, kind in enumerate(["norm", "value", "overflow", "none", "norm"]):
        give(runs[0], number, float(scale.scale), sparse=sparse)
        if kind == "overflow":
            runs[0][1].grad[3] = (math.inf, math.nan)[number % 2]
            before = everything(runs[0], scaled)
            assert not scaled.clip_and_step("norm", 0.5).isfinite()
            assert all(map(torch.equal, before, everything(runs[0], scaled)))
            assert scale.state() == (2.0**11, 0)
            scaled.zero_grad()
            continue
        give(runs[1], number, 1.0, sparse=sparse)
        norms = [optimizer.clip_and_step(kind, 0.5) for optimizer in optimizers]
        assert norms[0].equal(norms[1])
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert all(map(torch.equal, everything(runs[0], scaled), everything(runs[1], plain)))
    assert not runs[0][0].equal(run_of("cpu")[0])
    assert scale.state() == (2.0**11, 2)


def test_the_scale_grows_and_falls() -> None:
    (_, parameter) = run = run_of("cpu")
    run[0].requires_grad_(False)
    optimizer = make(run, {"name": "sgd"})
    scale = optimizer.loss_scale = LossScale(torch.device("cpu"), 8.0, window=2)
    address = scale.scale.data_ptr()
    states = []
    for overflows in (False, True, False, False, False, True, True):
        parameter.grad = torch.full_like(parameter, math.inf if overflows else 1.0)
        optimizer.step()
        states.append(scale.state())
    assert states == [(8.0, 1), (4.0, 0), (4.0, 1), (8.0, 0), (8.0, 1), (4.0, 0), (2.0, 0)]
    assert scale.scale.data_ptr() == address
    other = LossScale(torch.device("cpu"), window=2)
    assert other.state() == (2.0**16, 0)
    other.restore(*states[4])
    assert other.state() == (8.0, 1)


def test_the_norm_of_a_failed_batch_is_forgotten() -> None:
    run = run_of("cpu")
    optimizer = make(run, {"name": "sgd"})
    scale = optimizer.loss_scale = LossScale(torch.device("cpu"), 8.0)
    give(run, 1, math.inf)
    optimizer.clip("norm", 1.0)
    optimizer.zero_grad()
    give(run, 1, 8.0)
    before = run[1].detach().clone()
    optimizer.step()
    assert not run[1].equal(before)
    assert scale.state() == (8.0, 1)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["norm", "value", "none"])
@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_a_captured_step_skips_overflows(keys: dict[str, Any], kind: str) -> None:
    """Replays of a graph give the bits of steps outside, and the scale grows and falls within them."""
    runs = [run_of("cuda"), run_of("cuda")]
    optimizers = [make(run, keys) for run in runs]
    for run, optimizer in zip(runs, optimizers, strict=True):
        optimizer.loss_scale = LossScale(torch.device("cuda"), 2.0**12, window=2)
        optimizer.prepare()
        give(run, 0, 0.0)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled before the capture
        others = run_of("cuda")
        give(others, 0, 0.0)
        warm = make(others, keys)
        warm.loss_scale = LossScale(torch.device("cuda"))
        warm.clip_and_step(kind, 0.5)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured_norm = optimizers[0].clip_and_step(kind, 0.5)
    states = []
    for number, overflows in enumerate([False, True, False, False, True]):
        before = everything(runs[0], optimizers[0])
        for run, optimizer in zip(runs, optimizers, strict=True):
            give(run, number, math.inf if overflows else float(optimizer.loss_scale.scale))
        graph.replay()
        norm = optimizers[1].clip_and_step(kind, 0.5)
        assert captured_norm.isfinite().item() is not overflows
        assert overflows or captured_norm.equal(norm)
        after = everything(runs[0], optimizers[0])
        assert all(map(torch.equal, before, after)) is overflows
        assert all(map(torch.equal, after, everything(runs[1], optimizers[1])))
        states.append(optimizers[0].loss_scale.state())
    assert states == [(4096.0, 1), (2048.0, 0), (2048.0, 1), (4096.0, 0), (2048.0, 0)]


HALF = torch.float16


def in_float16(op: str, call: Call, device: str) -> list[Callable[..., Any]]:
    found = implementations_of(op.partition("-")[0]).values()
    return [
        partial(call.function, implementation=each.name)
        for each in found
        if each.traits.runs_on(device, HALF) and each.traits.is_available() and not each.traits.warms_up
    ]


def scaled_gradients(function: Callable[..., Any], arguments: dict[str, Any], scale: float) -> list[Tensor]:
    """The gradients of a random weighted sum of the results, times ``scale``, in all floating point arguments."""
    arguments = differentiable(arguments)
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    results = [x for x in tree_leaves(function(**arguments)) if isinstance(x, Tensor) and x.requires_grad]
    draws = torch.Generator().manual_seed(3)
    exact = torch.promote_types(leaves[0].dtype, torch.float32)
    total = leaves[0].new_zeros((), dtype=exact)
    for x in results:
        seed = torch.randn(x.shape, generator=draws, dtype=torch.float64).to(x.device, exact)
        total = total + (seed * x).sum()
    return list(torch.autograd.grad(total * scale, leaves, allow_unused=True, materialize_grads=True))


def check_in_float16(call: Call, functions: Iterable[Callable[..., Any]], device: str) -> None:
    """Compares with gradients of float64 as in training: by autocast, and times a power of two that is divided out again.

    Gradients beyond float16 become infinity or NaN, never its largest number, and so a step can be skipped.
    """
    # Random masks may depend on the type.
    arguments = {name: value for name, value in call.arguments.items() if not name.startswith("dropout")}
    expected = scaled_gradients(call.function, arguments, 1.0)
    assert max(float(part.detach().abs().max()) for part in expected) < 1e3
    for function in functions:
        with torch.autocast(device, HALF):
            found = scaled_gradients(function, to(torch.float32, arguments), 16.0)
        assert all(part.dtype == torch.float32 for part in found)
        assert_close([part / 16.0 for part in found], expected, TOLERANCE[HALF])
        overflowing = scaled_gradients(function, to(HALF, arguments), 1e5)
        assert not all(bool(part.isfinite().all()) for part in overflowing)


@each_op
def test_gradients_are_those_of_float64_or_show_an_overflow(op: str, device: str) -> None:
    call = calls(device, torch.float64)[op]
    check_in_float16(call, in_float16(op, call, device), device)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_scale_of_the_loss_beyond_float16(reduction: str, device: str) -> None:
    """The gradient of the loss is a float32 number, which may be out of float16's range if the product is not."""
    scale = 2.0**26
    make = Make(device, torch.float32)
    arguments = {"hidden": make(3, 8, scale=0.1), "weight": make(9, 8), "bias": make(9)}
    arguments["bias"][0] += 12.0  # an almost certain target has a small gradient
    targets = torch.zeros(3, dtype=torch.int64, device=device)
    call = partial(econmt_ops.linear_cross_entropy, targets=targets, reduction=reduction)
    expected = scaled_gradients(call, to(torch.float64, arguments), scale)
    with torch.autocast(device, HALF):
        found = scaled_gradients(partial(call, implementation="recompute"), arguments, scale)
    for left, right in zip(found, expected, strict=True):
        assert_close([left / right.abs().max()], [right / right.abs().max()], 2 * TOLERANCE[HALF])


def test_improbable_words_have_gradients(device: str) -> None:
    """Of 65,536 words each but the target has a probability that float16 rounds to a few units."""
    words = 1 << 16
    make = Make(device, torch.float32)
    hidden, weight = make(2, 4, scale=0.1), make(words, 4, scale=0.1)
    bias = torch.full((words,), -6.0, device=device)
    bias[0] = 6.0
    arguments = {"hidden": hidden, "weight": weight, "bias": bias}
    call = partial(econmt_ops.linear_cross_entropy, targets=torch.zeros(2, dtype=torch.int64, device=device))
    expected = scaled_gradients(call, to(torch.float64, arguments), 1.0)[1][1:]
    assert expected.abs().max() < 2e-6
    with torch.autocast(device, HALF):
        found = scaled_gradients(partial(call, implementation="recompute"), arguments, 1.0)[1][1:]
    assert_close([found / expected.abs().max()], [expected / expected.abs().max()], 2e-2)
