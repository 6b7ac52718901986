"""The ops without data: under FakeTensor, on the meta device, and traced by torch.compile."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.ops.every_op import calls, each_op
from tests.ops.helpers import assert_close, differentiable, values_and_gradients


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


def compare_compiled(op: str, device: str, dynamic: bool, autocast: bool) -> None:
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


@pytest.mark.sampled(3)
@each_op
def test_compiles_to_one_graph(op: str, device: str) -> None:
    compare_compiled(op, device, dynamic=False, autocast=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", ["additive_attention", "linear_cross_entropy", "linear-column"])
def test_compiles_for_any_size(op: str, device: str) -> None:
    compare_compiled(op, device, dynamic=True, autocast=False)


@pytest.mark.parametrize("op", ["additive_attention", "linear_cross_entropy"])
def test_compiles_under_autocast(op: str, device: str) -> None:
    compare_compiled(op, device, dynamic=False, autocast=True)


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
