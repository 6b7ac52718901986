"""PyTorch's defaults, checkpointing, contexts and precisions around the ops, and the account of what they keep."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import econmt_ops
from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import _signals_wait
from econmt_ops.core import precision
from econmt_ops.core import scopes as accounting
from econmt_ops.core.loops import shortened, steps_of
from econmt_ops.core.precision import compute_dtype, explicit_casts, recurrent_tf32
from econmt_ops.core.scopes import current_layer, layer
from econmt_ops.dispatch.rule import MODE, captured, rules_only
from econmt_ops.dispatch.session import current_session, measuring
from econmt_ops.layers.op import OPS
from tests.ops.empty import run
from tests.ops.every_op import calls, each_op
from tests.ops.helpers import assert_close, to, values_and_gradients
from tests.ops.layouts import problems, variants
from tests.ops.test_empty import options_of

PROBLEMS = problems("cpu")
each_variant = pytest.mark.parametrize(
    ("problem", "implementation"), [each for each in variants() if each[1] not in ("triton", "compiled")]
)


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Sets PyTorch's default type and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.sampled(20)
@each_variant
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")], ids=str
)
def test_defaults_change_no_result(
    problem: str, implementation: str, dtype: torch.dtype, other: str, device: str
) -> None:
    call = problems(device)[problem]
    for options in options_of(problem, implementation, device):
        options["implementation"] = implementation
        expected = run(call, **options)
        with defaults(dtype, other):
            found = run(call, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.sampled(10)
@each_variant
def test_checkpointing_changes_no_result(problem: str, implementation: str, device: str) -> None:
    call = problems(device)[problem]
    for options in options_of(problem, implementation, device):
        options["implementation"] = implementation
        checkpointed = call._replace(function=partial(checkpoint, call.function, use_reentrant=False))
        torch.testing.assert_close(run(checkpointed, **options), run(call, **options), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_rows_and_dropout_are_on_their_own_device(kind: str, device: str) -> None:
    layer = getattr(econmt_ops, kind)(5, 7, 2, dropout=0.5, device=device)
    packed = pack_sequence([torch.randn(length, 5, device=device) for length in (2, 4)], enforce_sorted=False)
    rows = []
    for other in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(other):
            rows.append(layer(packed)[0].data)
    torch.testing.assert_close(*rows, rtol=0, atol=0)


@pytest.mark.parametrize("op", ["attentional_lstm", "attentional_lstm-not-fed-dot"])
def test_attention_inside_the_decoder_is_attention(op: str, device: str) -> None:
    call = calls(device, torch.float32)[op]
    call.arguments["inputs"].requires_grad_()
    saved: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def save(tensor: Tensor) -> Tensor:
        saved[accounting.current_layer(), tuple(tensor.shape)] += 1
        return tensor

    with accounting.layer("decoder"), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        call.function(**call.arguments, implementation="reference")
    assert {layer for layer, _ in saved} == {"decoder", "attention"}
    # What only attention has: the hidden layer of the score, or the softmax over the source; here S is 4, A is 5.
    steps = 1 if op == "attentional_lstm" else 2
    of_attention = (3, steps, 4, 5) if op == "attentional_lstm" else (3, steps, 4)
    assert saved["attention", of_attention] > 0
    assert saved["decoder", of_attention] == 0


def test_watchers_hear_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(accounting, "watchers", [heard.append])
    with accounting.layer("decoder"), accounting.layer("attention"):
        pass
    assert heard == ["decoder", "attention", "decoder", "other"]


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda: shortened(nullcontext), lambda: len([*steps_of(range(9))])),
        (lambda: rules_only("cuda"), lambda: (MODE.rules_only, MODE.device)),
        (captured, lambda: MODE.captured),
        (lambda: measuring(remember=False), current_session),
        (native.without, lambda: native.off),
        (lambda: layer("decoder"), current_layer),
        (_signals_wait, lambda: signal.getsignal(signal.SIGINT)),
    ],
    ids=["shortened", "rules_only", "captured", "measuring", "without", "layer", "signals"],
)
def test_an_error_in_a_context_puts_back_what_was_there(
    make: Callable[[], AbstractContextManager[object]], state: Callable[[], object]
) -> None:
    check_put_back(make, state)


def check_put_back(
    make: Callable[[], AbstractContextManager[object]], state: Callable[[], object], *, nested: bool = True
) -> None:
    """Fails unless a context, and if ``nested`` one inside of it, put back a state after an error."""
    before = state()

    def fail(nested: bool) -> None:
        inside = state()
        assert inside != before
        if nested:
            with pytest.raises(KeyboardInterrupt), make():
                fail(False)
            assert state() == inside
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), make():
        fail(nested)
    assert state() == before


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def rounding_of(op: str, device: str, dtype: torch.dtype) -> float:
    """What may differ: on an H200 cuBLAS rounds a loop's products otherwise if operands lie otherwise in memory.

    In the interpreter the same kernels give equal bits.
    """
    return torch.finfo(dtype).eps if op.startswith("attentional_lstm") and device == "cuda" else 0.0


@each_op
def test_autocast_equals_casting_everything(op: str, device: str) -> None:
    call = calls(device, torch.float32)[op]
    with torch.autocast(device, torch.bfloat16):
        actual, gradients = values_and_gradients(call.function, call.arguments)
    if op.startswith("linear_recurrence"):
        # No products: autocast leaves it alone.
        expected, expected_gradients = values_and_gradients(call.function, call.arguments)
    else:
        expected, expected_gradients = values_and_gradients(call.function, to(torch.bfloat16, call.arguments))
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    rounding = rounding_of(op, device, torch.bfloat16)
    assert_close(actual, expected, rounding)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    # Gradients of parameters in float32 need not be rounded to the type of the products on their way.
    rounded = [gradient.to(torch.bfloat16).to(torch.float32) for gradient in gradients]
    found = gradients if op.startswith("linear_recurrence") else rounded
    assert_close(found, expected_gradients, 4 * rounding)


@each_op
def test_autocast_leaves_float64_alone(op: str, device: str) -> None:
    call = calls(device, torch.float64)[op]
    expected, expected_gradients = values_and_gradients(call.function, call.arguments)
    with torch.autocast(device, torch.bfloat16):
        actual, gradients = values_and_gradients(call.function, call.arguments)
    assert all(x.dtype == torch.float64 for x in actual)
    assert_close(actual, expected, 0.0)
    assert_close(gradients, expected_gradients, 0.0)


@each_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_first_argument_decides(op: str, dtype: torch.dtype, device: str) -> None:
    call = calls(device, torch.float32)[op]
    low = {**call.arguments, call.first: call.arguments[call.first].to(dtype)}
    actual = tensors(call.function(**low))
    # A state given in float32 keeps c exact, and so does the initial value of a recurrence.
    exact = {name: low[name] for name in ("initial",) if name in low}
    expected = tensors(call.function(**{**to(dtype, low), **exact}))
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    assert_close(actual, expected, rounding_of(op, device, dtype))


@each_op
def test_types_of_results(op: str, device: str) -> None:
    def types(dtype: torch.dtype) -> list[torch.dtype]:
        call = calls(device, dtype)[op]
        return [x.dtype for x in tensors(call.function(**call.arguments))]

    assert set(types(torch.float64)) == {torch.float64}
    assert set(types(torch.float32)) == {torch.float32}
    low = types(torch.bfloat16)
    high = [index for index, dtype in enumerate(low) if dtype == torch.float32]
    expected = {"lstm": [2, 4], "bidirectional_lstm": [2, 4], "attentional_lstm": [3, 5]}
    expected["linear_cross_entropy"] = [0]
    name, _, number = op.partition("-")
    if name in OPS:
        states = 2 * OPS[name].cells[int(number or 0)].states
        expected[op] = [n for n, state in enumerate(states, start=1) if state not in ("h", "x")]
    assert high == expected.get(op, expected.get(name, []))


def test_what_torch_compile_cannot_trace_is_not_asked(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    # torch.compile of torch 2.11 stops at this question.
    monkeypatch.delattr(torch.amp, "is_autocast_available")
    monkeypatch.delattr(torch.amp.autocast_mode, "is_autocast_available")
    for place in (device, "meta"):
        values = torch.zeros(1, dtype=torch.float16, device=place)
        assert compute_dtype(values) == torch.float16
        with explicit_casts(values):
            assert compute_dtype(values) == torch.float16


@pytest.mark.parametrize("allowed", [True, False])
def test_versions_of_torch_without_a_setting_for_recurrent_layers(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    monkeypatch.setattr(precision, "_get_precision", None)
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        assert recurrent_tf32() is allowed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_end_of_a_search_is_heard_after_it(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        with _signals_wait():
            signal.raise_signal(number)
            assert not heard
        assert heard == [number]
        signal.signal(number, signal.SIG_IGN)
        with _signals_wait():
            signal.raise_signal(number)
            assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
