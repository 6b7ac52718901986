"""The ops without data, traced, compiled, and under forward-mode differentiation and torch.func."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

import econmt_ops
from econmt_ops.backends import c as library
from econmt_ops.backends import compiled, steps_for
from econmt_ops.backends.c.steps import CSteps
from econmt_ops.backends.eager import EagerSteps
from econmt_ops.dispatch.traits import names_of
from tests.conftest import run_python
from tests.ops.cases import CASES, Sizes
from tests.ops.checking import VARIATIONS, Variation, check
from tests.ops.every_op import calls, each_op
from tests.ops.helpers import Make, assert_close, assert_same_function, differentiable, values_and_gradients


def shapes(tree: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(x.shape), x.dtype) for x in tree_leaves(tree) if isinstance(x, Tensor)]


@pytest.mark.sampled(12)
@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_tensors_forward_and_backward(op: str, dtype: torch.dtype, device: str) -> None:
    # A fake tensor has no data: reading a length, a maximum or a mask back on the host would fail.
    call = calls(device, dtype)[op]
    expected = shapes(call.function(**call.arguments))
    with FakeTensorMode() as mode:
        fake = differentiable(
            tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, call.arguments)
        )
        outputs = call.function(**fake)
        assert shapes(outputs) == expected
        leaves = [x for x in tree_leaves(fake) if isinstance(x, Tensor) and x.requires_grad]
        total = sum(x.float().sum() for x in tree_leaves(outputs) if isinstance(x, Tensor))
        gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    assert shapes(list(gradients)) == shapes(leaves)


@each_op
def test_meta_device(op: str) -> None:
    call = calls("cpu", torch.float32)[op]
    meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, call.arguments)
    assert shapes(call.function(**meta)) == shapes(call.function(**call.arguments))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("op", "dynamic", "autocast"),
    [
        *((op, False, False) for op in calls("cpu", torch.float32)),
        *((op, True, False) for op in ("additive_attention", "linear_cross_entropy", "linear-column")),
        *((op, False, True) for op in ("additive_attention", "linear_cross_entropy")),
    ],
)
def test_compiles_to_one_graph(op: str, dynamic: bool, autocast: bool, device: str) -> None:
    torch.compiler.reset()
    call = calls(device, torch.float32)[op]
    compiled = torch.compile(call.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    # On a GPU, cuDNN's LSTM adds up in another order than the steps it is traced as.
    tolerance = 2e-2 if autocast else 5e-5 if device == "cuda" else 1e-6
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        expected, expected_gradients = values_and_gradients(call.function, call.arguments)
        actual, gradients = values_and_gradients(compiled, call.arguments)
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    assert_close(actual, expected, tolerance)
    assert_close(gradients, expected_gradients, tolerance)


@pytest.mark.slow
def test_a_new_seed_compiles_nothing_anew(device: str) -> None:
    torch.compiler.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    call = calls(device, torch.float32)["lstm"]
    compiled = torch.compile(call.function, fullgraph=True, backend=count)
    for seed in range(20, 26):
        arguments = {**call.arguments, "dropout_seed": seed}
        actual, expected = compiled(**arguments)[0], call.function(**arguments)[0]
        assert_close([actual], [expected], 1e-6)
    # The second seed makes the seed an argument of the graph; from then on it is the same graph.
    assert graphs == 2


@pytest.mark.thorough
def test_operators_leave_the_compiler_alone() -> None:
    """torch.library imports it at an operator's first call: 70 MB and two seconds for a process that compiles nothing."""
    program = """
import sys, torch, econmt_ops
inputs = torch.randn(2, 4, 3, requires_grad=True)
layers = (econmt_ops.LSTMWeights(*(torch.randn(*size, requires_grad=True) for size in ((8, 3), (8, 2), (8,)))),)
outputs, _ = econmt_ops.lstm(inputs, layers, dropout=0.5, dropout_seed=1, implementation="recompute")
targets = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
weight = torch.randn(5, 2, requires_grad=True)
econmt_ops.linear_cross_entropy(outputs.reshape(-1, 2), weight, targets, implementation="recompute").backward()
print("torch._dynamo" in sys.modules)
doubled = torch.compile(lambda x: econmt_ops.lstm(x, layers, implementation="recompute")[0] * 2, backend="eager")
print(torch.allclose(doubled(inputs), 2 * outputs))
"""
    assert run_python("-c", program).stdout.split() == ["False", "True"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lstm", "gru", "lnlstm", "attentional-lstm-additive", "additive_attention"])
def test_values_and_gradients(name: str) -> None:
    """Two sizes each: the second must not need the first's."""
    for sizes in (Sizes(3, 5, 4, 6, 7, 9, 8), Sizes(4, 6, 5, 5, 10, 8, 7)):
        check(CASES[name], Variation(sizes), torch.float32, "cpu", ["reference", "compiled"])


@pytest.mark.slow
def test_losses() -> None:
    for rows in (3, 4):
        make = Make("cpu", torch.float32)
        arguments = {"hidden": make(rows, 5), "weight": make(11, 5), "bias": make(11)}
        options = {"targets": torch.arange(rows), "label_smoothing": 0.1, "ignore_index": 1}
        loss = functools.partial(econmt_ops.linear_cross_entropy, **options)
        by_name = [functools.partial(loss, implementation=name) for name in ("compiled", "reference")]
        assert_same_function(*by_name, arguments, torch.float32)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiled.is_available.cache_clear()
    try:
        with pytest.warns(
            RuntimeWarning, match=r"no C\+\+ compiler found, so 'compiled' runs as 'recompute'"
        ):
            check(CASES["lstm"], VARIATIONS["full"], torch.float32, "cpu", ["compiled"])
        assert type(steps_for(torch.empty(0), "compiled")) is CSteps
    finally:
        compiled.is_available.cache_clear()
    monkeypatch.setenv("CXX", "one of the user's")
    monkeypatch.setattr(shutil, "which", lambda name: name == "one of the user's")
    assert compiled.has_compiler()
    for limit, expected in ((1, 64), (1000, 1000)):
        with torch._dynamo.config.patch(recompile_limit=limit):
            compiled.allow_variants()
            assert torch._dynamo.config.recompile_limit == expected


def test_the_choice_of_a_backend() -> None:
    assert type(steps_for(torch.empty(0))) is CSteps
    assert type(steps_for(torch.empty(0, dtype=torch.float64))) is EagerSteps
    assert type(steps_for(torch.empty(0), "compiled")) is compiled.CompiledSteps
    with library.without():
        assert type(steps_for(torch.empty(0))) is EagerSteps


@pytest.fixture
def _traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps that torch.compile traces and hands to no compiler; it fails where it would give up."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(compiled, "is_available", lambda: True)
    compiled.compile_step.cache_clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    compiled.compile_step.cache_clear()
    torch.compiler.reset()


@pytest.mark.thorough
@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("name", ["lstm", "attentional-lstm-additive"])
def test_many_shapes_and_steps_are_not_compiled_anew_too_often(name: str) -> None:
    case = CASES[name]
    sizes = (3, 4, 5, 8), (2, 7, 3, 8), (1, 5, 2, 8), (5, 3, 1, 6), (4, 1, 4, 6), (6, 9, 8, 10)
    for rows, steps, positions, hidden in sizes:
        tensors = case.tensors(
            Make("cpu", torch.float32), Sizes(rows, steps, positions, hidden, hidden, hidden, hidden)
        )
        lengths = torch.arange(rows) % (steps if name == "lstm" else positions) + 1
        for leaf in tree_leaves(tensors):
            if leaf is not None:
                leaf.requires_grad_()
        for stash in ("outputs", "gates"):
            outputs = case.op(**tensors, lengths=lengths, implementation="compiled", stash=stash)[0]
            outputs.square().sum().backward()


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
    assert_close([dual_tangent(function, point, tangent)], [slope], 1e-7)
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
