"""Every op under forward-mode differentiation, torch.func and second derivatives: right, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import econmt_ops
from econmt_ops.dispatch.traits import names_of
from tests.ops.every_op import calls, each_op
from tests.ops.helpers import assert_close


def function_of(op: str, **options: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Returns an op in float64 as a function of its first argument to one vector, and that argument."""
    call = calls("cpu", torch.float64)[op]

    def function(first: Tensor) -> Tensor:
        made = tree_leaves(call.function(**{**call.arguments, call.first: first}, **options))
        return torch.cat([part.flatten() for part in made if part is not None])

    return function, call.arguments[call.first]


def dual_tangent(function: Callable[[Tensor], Tensor], point: Tensor, tangent: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(point, tangent))).tangent


@each_op
def test_forward_mode_and_transforms_of_torch_func(op: str) -> None:
    function, point = function_of(op)
    tangent = torch.sin(torch.arange(point.numel(), dtype=point.dtype)).view(point.shape)
    step = 1e-6 * tangent
    slope = (function(point + step) - function(point - step)) / 2e-6
    found = dual_tangent(function, point, tangent)
    assert found is not None
    assert_close([found], [slope], 1e-7)
    assert_close([torch.func.jvp(function, (point,), (tangent,))[1]], [slope], 1e-7)
    weights = torch.cos(torch.arange(slope.numel(), dtype=point.dtype))
    leaf = point.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf) @ weights, leaf)
    assert_close([torch.func.grad(lambda first: function(first) @ weights)(point)], [gradient], 1e-11)
    assert_close([(gradient * tangent).sum()], [slope @ weights], 1e-6)


@each_op
def test_named_implementations_have_no_forward_mode(op: str) -> None:
    name = calls("cpu", torch.float64)[op].function.__name__
    for implementation in set(names_of(name)) & {"recompute", "chunk"}:
        function, point = function_of(op, implementation=implementation)
        message = "has no forward-mode derivative; name implementation='reference', which has"
        with pytest.raises(RuntimeError, match=message):
            dual_tangent(function, point, torch.ones_like(point))
        with pytest.raises(RuntimeError, match=message):
            torch.func.jvp(function, (point,), (torch.ones_like(point),))
        wanted = function(point)
        with forward_ad.dual_level():  # without a tangent there is nothing to lose
            assert_close([function(point)], [wanted], 1e-11)


@pytest.mark.parametrize(
    "op", ["linear_recurrence", *(pytest.param(op, marks=pytest.mark.thorough) for op in ("gru", "sru"))]
)
def test_transforms_within_torch_compile(op: str) -> None:
    torch.compiler.reset()
    function, point = function_of(op)
    tangent = torch.ones_like(point)

    def both(first: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.func.jvp(function, (first,), (tangent,))[1]
        return slope, torch.func.grad(lambda first: function(first).sum())(first)

    assert_close(torch.compile(both, backend="aot_eager", fullgraph=True)(point), both(point), 1e-9)


def test_forward_mode_of_a_packed_product() -> None:
    inputs, weight = torch.randn(3, 5), torch.randn(7, 5)
    found = dual_tangent(
        lambda first: econmt_ops.linear(first, weight, layout="packed"), inputs, torch.ones_like(inputs)
    )
    assert found is not None
    assert_close([found], [torch.ones_like(inputs) @ weight.t()], 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_penalty_on_the_gradient_of_a_loss_is_refused(reduction: str) -> None:
    """The second derivative arrives together with the gradient of the loss."""
    layer = econmt_ops.LinearCrossEntropy(5, 7, reduction=reduction, implementation="recompute")
    hidden, targets = torch.randn(4, 5, requires_grad=True), torch.arange(4)

    def penalized() -> Tensor:
        loss = layer(hidden, targets).sum()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + gradient.square().sum()

    told = "linear_cross_entropy has no second derivative; name implementation="
    with pytest.raises(RuntimeError, match=told):
        penalized().backward()
    layer.implementation = "reference"
    found = torch.autograd.grad(penalized(), [hidden, layer.weight])
    loss = nn.functional.cross_entropy(layer.logits(hidden), targets, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    wanted = torch.autograd.grad(loss + gradient.square().sum(), [hidden, layer.weight])
    assert_close(list(found), list(wanted), 1e-5)


def compare_samples(module: nn.Module, rows: Tensor, **given: Any) -> None:
    """Compares the gradients of all parameters for each of several batches by torch.vmap with those of a loop."""

    def loss(weights: dict[str, Tensor], rows: Tensor, given: dict[str, Tensor]) -> Tensor:
        made = tree_leaves(torch.func.functional_call(module, weights, (rows,), given))
        return made[0].sin().sum()

    weights = dict(module.named_parameters())
    found = torch.vmap(torch.func.grad(loss), (None, 0, 0))(weights, rows, given)
    for number, row in enumerate(rows):
        parts = {name: value[number] for name, value in given.items()}
        wanted = torch.autograd.grad(loss(weights, row, parts), list(weights.values()))
        assert_close([found[name][number] for name in weights], list(wanted), 1e-9)


@pytest.mark.parametrize("kind", ["GRU", "SRU", "QRNN", "LayerNormLSTM"])
def test_gradients_of_each_sample_of_layers_with_lengths(kind: str) -> None:
    torch.manual_seed(1)
    options = {"batch_first": True} if kind == "GRU" else {}
    module = getattr(econmt_ops, kind)(5, 4, 2, dtype=torch.float64, **options)
    lengths = torch.tensor([[3, 1], [2, 0], [3, 3]])
    compare_samples(module, torch.randn(3, 2, 3, 5, dtype=torch.float64), lengths=lengths)


def test_gradients_of_each_sample_of_attention_and_losses() -> None:
    torch.manual_seed(1)
    rows = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    lengths = torch.tensor([[4, 1], [2, 0], [3, 3]])
    compare_samples(econmt_ops.AdditiveAttention(5, 5, 6).double(), rows, keys=rows, lengths=lengths)
    targets = torch.tensor([[0, 1, 2, -100]]).expand(3, 2, 4)
    compare_samples(econmt_ops.LinearCrossEntropy(5, 7, dtype=torch.float64), rows, targets=targets)
