"""All ops in float16, under a loss scale: gradients of float64, and overflows that can be seen in the gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import econmt_ops
from econmt_ops.dispatch.traits import implementations_of
from tests.ops.every_op import Call, calls, each_op
from tests.ops.helpers import TOLERANCE, Make, assert_close, differentiable, to

HALF = torch.float16


def without_dropout(call: Call) -> dict[str, Any]:
    """The arguments of a call, but for random masks, which may depend on the type."""
    return {name: value for name, value in call.arguments.items() if not name.startswith("dropout")}


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


@each_op
def test_weights_in_float32_under_a_loss_scale(op: str, device: str) -> None:
    """As in training: autocast, and gradients times a power of two, of which those of the arguments are free again."""
    call = calls(device, torch.float64)[op]
    arguments = without_dropout(call)
    expected = scaled_gradients(call.function, arguments, 1.0)
    for function in in_float16(op, call, device):
        with torch.autocast(device, HALF):
            found = scaled_gradients(function, to(torch.float32, arguments), 16.0)
        assert all(part.dtype == torch.float32 for part in found)
        assert_close([part / 16.0 for part in found], expected, TOLERANCE[HALF])


@each_op
def test_an_overflow_shows(op: str, device: str) -> None:
    """Gradients beyond float16 become infinity or NaN, never its largest number, and so a step can be skipped."""
    call = calls(device, torch.float64)[op]
    arguments = to(HALF, without_dropout(call))
    gradients = scaled_gradients(call.function, arguments, 1.0)
    assert max(float(part.detach().abs().max()) for part in gradients) < 1e3
    for function in in_float16(op, call, device):
        found = scaled_gradients(function, arguments, 1e5)
        assert not all(bool(part.isfinite().all()) for part in found)


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
