from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from econmt_ops.core import precision
from econmt_ops.core.precision import accumulate_dtype, compute_dtype, explicit_casts, recurrent_tf32
from econmt_ops.layers.op import OPS
from tests.ops.every_op import calls, each_op
from tests.ops.helpers import assert_close, to, values_and_gradients


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
    expected = {
        "lstm": [2, 4],
        "bidirectional_lstm": [2, 4],
        "attentional_lstm": [3, 5],
        "linear_cross_entropy": [0],
    }
    name, _, number = op.partition("-")
    if name in OPS:
        states = 2 * OPS[name].cells[int(number or 0)].states
        expected[op] = [n for n, state in enumerate(states, start=1) if state not in ("h", "x")]
    assert high == expected.get(op, expected.get(name, []))


def test_rules(device: str) -> None:
    values = {dtype: torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64)}
    assert compute_dtype(values[torch.float32]) == torch.float32
    with torch.autocast(device, torch.bfloat16):
        assert compute_dtype(values[torch.float32]) == torch.bfloat16
        assert compute_dtype(values[torch.float64]) == torch.float64
        with explicit_casts(values[torch.float32]):
            assert compute_dtype(values[torch.float32]) == torch.float32
        assert torch.is_autocast_enabled(device)
    assert compute_dtype(torch.zeros(1, dtype=torch.float16, device="meta")) == torch.float16
    assert accumulate_dtype(torch.float64) == torch.float64
    assert {accumulate_dtype(d) for d in (torch.float32, torch.float16, torch.bfloat16)} == {torch.float32}


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
