"""What the tests of all ops share: random arguments, comparison of values and gradients, and naive definitions.

The naive definitions walk row by row, position by position, over exactly the positions a row has, so that neither masks nor batching nor
fused gates can go wrong in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from econmt_ops.core.weights import LowRank, LowRankLSTMWeights, LSTMState, LSTMWeights
from econmt_ops.dispatch.traits import implementations_of

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def each_implementation(op: str) -> pytest.MarkDecorator:
    """Runs a test with every implementation of an op that works on every machine.

    But for "compiled", which is "recompute" with other step functions and compiles anew for many of these sizes:
    test_tracing.py runs it on a few.
    """
    found = [each for each in implementations_of(op).values() if each.traits.is_available()]
    names = [each.name for each in found if "cpu" in each.traits.devices and not each.traits.warms_up]
    return pytest.mark.parametrize("implementation", names)


class Make:
    """Makes random arguments, the same ones for the same seed."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float64, seed: int = 1) -> None:
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(self.device, self.dtype)

    def layer(self, inputs: int, hidden: int) -> LSTMWeights:
        shapes = (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,)
        return LSTMWeights(*(self(*shape, scale=0.5) for shape in shapes))

    def layers(self, inputs: int, hidden: int, count: int) -> tuple[LSTMWeights, ...]:
        return tuple(self.layer(inputs if k == 0 else hidden, hidden) for k in range(count))

    def low_rank_layer(self, inputs: int, hidden: int, rank: int) -> LowRankLSTMWeights:
        return LowRankLSTMWeights(
            LowRank(self(4 * hidden, rank, scale=0.7), self(rank, inputs, scale=0.7)),
            LowRank(self(4 * hidden, rank, scale=0.7), self(rank, hidden, scale=0.7)),
            self(4 * hidden, scale=0.5),
        )

    def low_rank_layers(
        self, inputs: int, hidden: int, count: int, rank: int
    ) -> tuple[LowRankLSTMWeights, ...]:
        return tuple(self.low_rank_layer(inputs if k == 0 else hidden, hidden, rank) for k in range(count))

    def state(self, batch: int, hidden: int, count: int) -> LSTMState:
        return tuple((self(batch, hidden, scale=0.5), self(batch, hidden)) for _ in range(count))


def to(dtype: torch.dtype, tree: Any) -> Any:
    """Returns the tree with its floating point tensors in another type."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def differentiable(tree: Any) -> Any:
    """The same tensors, of which those of floating point are leaves that require gradients."""
    return tree_map(
        lambda x: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x, tree
    )


def values_and_gradients(
    function: Callable[..., Any], arguments: dict[str, Any], cotangents_of: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs of a function and the gradients of a random weighted sum of them in all floating point arguments, in order."""
    arguments = differentiable(arguments)
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    outputs = [x for x in tree_leaves(function(**arguments)) if isinstance(x, Tensor)]
    generator = torch.Generator().manual_seed(7)
    like = cotangents_of or outputs
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in like]
    wanted = [(x, y) for x, y in zip(outputs, cotangents, strict=True) if x.requires_grad]
    results, seeds = [x for x, _ in wanted], [y for _, y in wanted]
    handed_in = [seed.clone() for seed in seeds]
    gradients = torch.autograd.grad(results, leaves, seeds, allow_unused=True, materialize_grads=True)
    assert all(map(torch.equal, seeds, handed_in)), "gradients that are handed in are the caller's"
    return [x.detach() for x in outputs], list(gradients)


def assert_close(
    actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float, name: str = "tensor"
) -> None:
    assert len(actual) == len(expected)
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert left.shape == right.shape, number
        left, right = left.detach().cpu().double(), right.detach().cpu().double()
        # Relative to the largest value of the tensor: sums of many terms may cancel.
        largest = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        error = float((left - right).abs().max()) if right.numel() else 0.0
        assert error <= tolerance * largest, f"{name} {number}: error {error} of {largest}"


def assert_same_function(
    function: Callable[..., Any],
    definition: Callable[..., Any],
    arguments: dict[str, Any],
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compares values and the gradients of every tensor argument; the definition runs in float64 on the same, rounded arguments."""
    rounded = to(dtype, arguments)
    expected, expected_gradients = values_and_gradients(definition, to(torch.float64, rounded))
    actual, gradients = values_and_gradients(function, rounded, expected)
    assert_close(actual, expected, TOLERANCE[dtype])
    assert_close(gradients, expected_gradients, TOLERANCE[dtype])


def scatter_strides(tree: Any) -> Any:
    """Returns the tree with equal tensors whose memory is not contiguous."""

    def scatter(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0:
            return x
        wide = (
            torch.full((*x.shape, 3), float("nan"), dtype=x.dtype, device=x.device)
            .transpose(0, x.dim() - 1)
            .clone()
        )
        wide = wide.transpose(0, x.dim() - 1)
        wide[..., 1] = x
        return wide[..., 1]

    return tree_map(scatter, tree)


def poisoned(tensor: Tensor, lengths: Tensor, poison: float = float("nan")) -> Tensor:
    """Returns (B, N, D) with poison at and past every row's length."""
    padding = torch.arange(tensor.shape[1]) >= lengths.cpu().unsqueeze(1)
    return tensor.masked_fill(padding.unsqueeze(2).to(tensor.device), poison)


def padded_part(tensor: Tensor, lengths: Tensor) -> Tensor:
    """Returns, in one dimension, what lies at and past every row's length in (B, N, ...)."""
    padding = torch.arange(tensor.shape[1]) >= lengths.cpu().unsqueeze(1)
    return tensor[padding.to(tensor.device)].flatten()
