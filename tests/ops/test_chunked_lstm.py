"""Layers in chunks of time, blocks of steps, and layers whose matrices are factorised, whose factors never meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

import econmt_ops
from econmt_ops import LSTMWeights, lstm
from econmt_ops.dispatch.rule import rules_only
from econmt_ops.lstm import chunked, unrolled
from econmt_ops.lstm.chunked import ChunkedLSTM
from tests.ops.cases import Parts, Sizes, low_rank
from tests.ops.helpers import Make, assert_close, each_implementation, values_and_gradients

BATCH, WIDTH, HIDDEN = 3, 5, 4
FULL = pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])


def leaves(device: str, steps: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    make = Make(device, dtype)
    given = {**make.layer(WIDTH, HIDDEN)._asdict(), "inputs": make(BATCH, steps, WIDTH)}
    given |= {"h": make(BATCH, HIDDEN), "c": make(BATCH, HIDDEN)}
    return {name: value.detach().clone().requires_grad_() for name, value in given.items()}


def weights_of(own: dict[str, Tensor]) -> LSTMWeights:
    """Of leaves, the recurrent matrix made of one, as by dropout; the bias has a gradient already."""
    own["bias"].grad = torch.ones_like(own["bias"])
    return LSTMWeights(own["input"], own["hidden"] * 2.0, own["bias"])


def loss_of(outputs: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
    weighting = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=outputs.dtype, device=outputs.device)
    return (outputs * weighting.view(outputs.shape)).sum() + state[0].square().sum() + state[1].sum()


def in_chunks(
    own: dict[str, Tensor], layer: ChunkedLSTM, size: int, lengths: Tensor | None, reverse: bool, how: str
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    steps, found = own["inputs"].shape[1], {}
    state = (own["h"], own["c"]) if "h" in own else None
    begins = range(0, steps, size)
    for begin in reversed(begins) if reverse else begins:
        part = own["inputs"][:, begin : begin + size]
        here = None if lengths is None else (lengths - begin).clamp(0, part.shape[1])
        found[begin], state = layer(part, state, lengths=here, reverse=reverse, implementation=how)
    return torch.cat([found[begin] for begin in begins], 1), state


@each_implementation("lstm")
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@FULL
@pytest.mark.parametrize(("steps", "size"), [(7, 3), (7, 7), (5, 1)])
def test_equals_one_call(
    steps: int, size: int, full: bool, reverse: bool, implementation: str, device: str
) -> None:
    lengths = None if full else torch.tensor([steps, 1, steps - 1])
    alone, own = leaves(device, steps), leaves(device, steps)
    options = {"state": ((alone["h"], alone["c"]),), "lengths": lengths, "reverse": reverse}
    outputs, (state,) = lstm(alone["inputs"], (weights_of(alone),), **options)
    loss_of(outputs, state).backward()  # type: ignore[no-untyped-call]
    layer = ChunkedLSTM(weights_of(own))
    found, last = in_chunks(own, layer, size, lengths, reverse, implementation)
    loss_of(found, last).backward()  # type: ignore[no-untyped-call]
    layer.backward()
    assert_close([found, *last], [outputs, *state], 1e-12)
    gradients = [[leaf.grad for leaf in each.values() if leaf.grad is not None] for each in (own, alone)]
    assert len(gradients[0]) == len(own)
    assert_close(*gradients, 1e-12)


def test_a_chunk_that_the_loss_does_not_need_adds_nothing(device: str) -> None:
    alone, own = leaves(device, 3), leaves(device, 3)
    found = []
    for each, count in ((alone, 1), (own, 2)):
        layer, state = ChunkedLSTM(weights_of(each)), (each["h"], each["c"])
        (outputs, _), *_ = [layer(each["inputs"], state) for _ in range(count)]
        outputs.sum().backward()
        layer.backward()
        found.append([leaf.grad for leaf in each.values()])
    assert_close(*found, 0.0)


@FULL
def test_the_gradient_of_the_gates_is_that_of_the_definition(full: bool, device: str) -> None:
    """`test_equals_one_call` shows that the weights' gradients follow from it."""
    make, lengths = Make(device), None if full else torch.tensor([6, 0, 4])
    gate_gradient = torch.zeros(6, BATCH, 4 * HIDDEN, dtype=torch.float64, device=device)
    given = {"inputs": make(BATCH, 6, WIDTH), "gate_gradient": gate_gradient}
    options = {"layers": make.layers(WIDTH, HIDDEN, 1), "lengths": lengths}
    found, expected = (
        values_and_gradients(partial(lstm, **options, implementation=name), given)
        for name in ("recompute", "reference")
    )
    assert_close(found[1], expected[1], 1e-12)


def test_weights_are_cast_once_and_sums_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("add_outer", "cast_weights"):
        original = getattr(chunked, name)
        monkeypatch.setattr(
            chunked, name, lambda *given, _name=name, _how=original: (calls.append(_name), _how(*given))[1]
        )
    own = leaves("cpu", 7, torch.float32)
    layer = ChunkedLSTM(LSTMWeights(own["input"], own["hidden"], own["bias"]))
    with torch.autocast("cpu"), rules_only():
        outputs, state = in_chunks(own, layer, 2, None, False, "auto")
    loss_of(outputs.float(), state).backward()  # type: ignore[no-untyped-call]
    assert own["input"].grad is None
    layer.backward()
    assert calls == ["cast_weights", "add_outer", "add_outer"]
    assert own["hidden"].grad.dtype == torch.float32
    before = own["hidden"].grad.clone()
    layer.backward()
    torch.testing.assert_close(own["hidden"].grad, before)


def test_the_next_update_reads_the_weights_as_they_are_then() -> None:
    """Weights whose copies in another type are kept from chunk to chunk."""
    own = leaves("cpu", 4, torch.float32)
    weights = LSTMWeights(own["input"], own["hidden"], own["bias"])
    layer, found = ChunkedLSTM(weights), []
    for factor in (1.0, 0.5):
        with torch.no_grad():
            own["hidden"].mul_(factor)
        with torch.autocast("cpu"), rules_only():
            wanted, _ = in_chunks(own, ChunkedLSTM(weights), 2, None, False, "auto")
            outputs, state = in_chunks(own, layer, 2, None, False, "auto")
        assert torch.equal(outputs, wanted)
        found.append(outputs)
        loss_of(outputs.float(), state).backward()  # type: ignore[no-untyped-call]
        layer.backward()
    assert not torch.equal(*found)


class _Shapes(TorchDispatchMode):
    """The shapes of everything that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OPDEFS.get(func._schema.name)
        if own is not None:
            with self:  # or what the operator does inside would not be seen
                return own._init_fn(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self.seen.add(tuple(made.shape))
        return result


@pytest.mark.parametrize(
    "mode", [_Shapes, pytest.param(nullcontext, marks=[pytest.mark.thorough, pytest.mark.slow])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_equals_recompute(
    dtype: torch.dtype, mode: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps go into one function and the fifth is made in place; in a dispatch mode nothing is compiled."""
    monkeypatch.setattr(unrolled, "_TOGETHER", 2)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    tensors = low_rank(Make("cpu", dtype), Sizes(B=3, T=5, I=4, H=6, L=1))
    lengths = torch.tensor([5, 1, 4])
    with mode():
        for stash, reverse in (("outputs", True), ("gates", False)):
            options = {"lengths": lengths, "stash": stash, "reverse": reverse}
            runs = (
                partial(econmt_ops.lstm, **options, implementation=way) for way in ("recompute", "compiled")
            )
            results = [values_and_gradients(run, tensors) for run in runs]
            assert_close(results[1][0], results[0][0], tolerance)
            assert_close(results[1][1], results[0][1], tolerance)
        with torch.no_grad():
            alone, _ = econmt_ops.lstm(**tensors, lengths=lengths, implementation="compiled")
            expected, _ = econmt_ops.lstm(**tensors, lengths=lengths, implementation="reference")
        assert_close([alone], [expected], tolerance)


@pytest.mark.parametrize("implementation", ["reference", "recompute"])
@pytest.mark.parametrize("fed", [None, True], ids=["lstm", "fed"])
def test_the_product_of_the_factors_is_never_made(implementation: str, fed: bool | None) -> None:
    sizes = Sizes(B=3, T=5, I=11, H=13, L=1)
    tensors = low_rank(Make("cpu"), sizes) if fed is None else Parts("low-rank").tensors(Make("cpu"), sizes)
    op = econmt_ops.lstm if fed is None else econmt_ops.attentional_lstm
    more = {} if fed is None else {"lengths": None}
    watch = _Shapes()
    with watch:
        values_and_gradients(lambda **tensors: op(**tensors, **more, implementation=implementation), tensors)
    assert (15, 52) in watch.seen or (3, 52) in watch.seen
    assert not watch.seen & {(52, 11), (52, 13), (52, 24), (11, 52), (13, 52), (24, 52)}
