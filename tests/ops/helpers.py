"""What the tests of all ops share: random arguments, comparison of values and gradients, and naive definitions.

The naive definitions walk row by row, position by position, over exactly the positions a row has, so that neither masks nor batching nor
fused gates can go wrong in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from econmt_ops.core.weights import (
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    LowRank,
    LowRankLSTMWeights,
    LSTMState,
    LSTMWeights,
)
from econmt_ops.dispatch.traits import implementations_of

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def each_implementation(op: str) -> pytest.MarkDecorator:
    """Runs a test with every implementation of an op that works on every machine.

    But for "compiled", which is "recompute" with other step functions and compiles anew for many of these sizes:
    test_compiled.py runs it on a few.
    """
    found = [each for each in implementations_of(op).values() if each.traits.is_available()]
    names = [each.name for each in found if "cpu" in each.traits.devices and not each.traits.warms_up]
    return pytest.mark.parametrize("implementation", names)


def each_size(*sizes: dict[str, int]) -> pytest.MarkDecorator:
    """Runs a test with every one of these sizes, named as B2-T5-H7."""
    params = [
        pytest.param(SimpleNamespace(**size), id="-".join(f"{name}{value}" for name, value in size.items()))
        for size in sizes
    ]
    return pytest.mark.parametrize("size", params)


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
        return LSTMWeights(
            self(4 * hidden, inputs, scale=0.5),
            self(4 * hidden, hidden, scale=0.5),
            self(4 * hidden, scale=0.5),
        )

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


def whole(layers: Sequence[LowRankLSTMWeights]) -> tuple[LSTMWeights, ...]:
    """The layers with their matrices multiplied out."""
    return tuple(
        LSTMWeights(layer.input.left @ layer.input.right, layer.hidden.left @ layer.hidden.right, layer.bias)
        for layer in layers
    )


def to(dtype: torch.dtype, tree: Any) -> Any:
    """Returns the tree with its floating point tensors in another type."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def values_and_gradients(
    function: Callable[..., Any], arguments: dict[str, Any], cotangents_of: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs of a function and the gradients of a random weighted sum of them in all floating point arguments, in order."""
    arguments = tree_map(
        lambda x: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x,
        arguments,
    )
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
    outputs = [x for x in tree_leaves(function(**arguments)) if isinstance(x, Tensor)]
    generator = torch.Generator().manual_seed(7)
    cotangents = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in cotangents_of or outputs
    ]
    wanted = [(x, y) for x, y in zip(outputs, cotangents, strict=True) if x.requires_grad]
    gradients = torch.autograd.grad(
        [x for x, _ in wanted], leaves, [y for _, y in wanted], allow_unused=True, materialize_grads=True
    )
    return [x.detach() for x in outputs], list(gradients)


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    assert len(actual) == len(expected)
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert left.shape == right.shape, number
        left, right = left.detach().double(), right.detach().double()
        # Relative to the largest value of the tensor: sums of many terms may cancel.
        largest = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        error = float((left - right).abs().max()) if right.numel() else 0.0
        assert error <= tolerance * largest, f"tensor {number}: error {error} of {largest}"


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


def assert_gradcheck(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Compares the gradients of every tensor argument to finite differences."""
    arguments = tree_map(
        lambda x: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x,
        arguments,
    )
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        filled = tree_map(
            lambda x: next(given) if isinstance(x, Tensor) and x.requires_grad else x, arguments
        )
        outputs = tree_leaves(function(**filled))
        return tuple(x for x in outputs if isinstance(x, Tensor) and x.requires_grad)

    assert torch.autograd.gradcheck(flat, leaves, fast_mode=False)


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


def naive_cell(x: Tensor, layer: LSTMWeights, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of one row: x (I,), h and c (H,)."""
    i, f, g, o = (layer.input @ x + layer.hidden @ h + layer.bias).chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def naive_stack(
    x: Tensor,
    layers: Sequence[LSTMWeights],
    state: list[tuple[Tensor, Tensor]],
    residual: bool,
    masks: list[Tensor | None],
) -> Tensor:
    """One step of one row through all layers; changes the state."""
    for k, layer in enumerate(layers):
        mask = masks[k]
        if mask is not None:
            x = x * mask
        h, c = naive_cell(x, layer, *state[k])
        state[k] = h, c
        x = h + x if residual and k > 0 else h
    return x


def naive_lstm(
    inputs: Tensor,
    layers: tuple[LSTMWeights, ...],
    state: LSTMState | None = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
    residual: bool = False,
    masks: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, LSTMState]:
    """As `econmt_ops.lstm`; masks (B, T, H) or None, a layer."""
    batch, steps, _ = inputs.shape
    hidden = layers[0].hidden.shape[1]
    rows, lasts = [], []
    for b in range(batch):
        length = steps if lengths is None else int(lengths[b])
        row = [inputs.new_zeros(hidden) for _ in range(steps)]
        last = [
            (inputs.new_zeros(hidden), inputs.new_zeros(hidden))
            if state is None
            else (state[k][0][b], state[k][1][b])
            for k in range(len(layers))
        ]
        for t in range(length - 1, -1, -1) if reverse else range(length):
            step_masks = [None if mask is None else mask[b, t] for mask in masks or [None] * len(layers)]
            row[t] = naive_stack(inputs[b, t], layers, last, residual, step_masks)
        rows.append(torch.stack(row))
        lasts.append(last)
    return torch.stack(rows), tuple(
        (torch.stack([last[k][0] for last in lasts]), torch.stack([last[k][1] for last in lasts]))
        for k in range(len(layers))
    )


def naive_normalise(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Layer normalisation of one vector."""
    return (x - x.mean()) / ((x - x.mean()).square().mean() + 1e-5).sqrt() * gain + bias


def naive_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    score: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """One query (A,) of one row to its keys (S, A): context (E,) and weights (S,)."""
    weights = keys.new_zeros(keys.shape[0])
    context = values.new_zeros(values.shape[1])
    if length > 0:
        exponentials = [score(query, keys[s]).exp() for s in range(length)]
        total = sum(exponentials)
        weights = torch.stack(
            [e / total for e in exponentials] + [keys.new_zeros(()) for _ in range(length, keys.shape[0])]
        )
        for s in range(length):
            context = context + weights[s] * values[s]
    return context, weights


def additive_score(
    weight: Tensor, layer_norm: tuple[Tensor, Tensor] | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The score of additive attention."""

    def score(query: Tensor, key: Tensor) -> Tensor:
        total = query + key if layer_norm is None else naive_normalise(query + key, *layer_norm)
        return (weight * total.tanh()).sum()

    return score


def naive_additive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    score_weight: Tensor,
    lengths: Tensor | None = None,
    layer_norm: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `econmt_ops.additive_attention`."""
    score = additive_score(score_weight, layer_norm)
    contexts, weights = [], []
    for b in range(query.shape[0]):
        length = keys.shape[1] if lengths is None else int(lengths[b])
        pairs = [naive_attend(q, keys[b], values[b], length, score) for q in query[b]]
        contexts.append(torch.stack([context for context, _ in pairs]))
        weights.append(torch.stack([weight for _, weight in pairs]))
    return torch.stack(contexts), torch.stack(weights)


def naive_attentional_lstm(
    inputs: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: AttentionalLSTMWeights,
    lengths: Tensor | None = None,
    state: AttentionalLSTMState | None = None,
    input_feeding: bool = True,
    residual: bool = False,
    masks: Sequence[Tensor | None] | None = None,
    layer_norm: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
    """As `econmt_ops.attentional_lstm`; masks (B, T, H) or None, a layer."""
    count, hidden = len(weights.layers), weights.combine.shape[0]

    def dot(query: Tensor, key: Tensor) -> Tensor:
        return scale * (query * key).sum()

    score = dot if weights.score is None else additive_score(weights.score, layer_norm)
    outputs, attentions, lasts, fed_rows = [], [], [], []
    for b in range(inputs.shape[0]):
        length = keys.shape[1] if lengths is None else int(lengths[b])
        zeros = inputs.new_zeros(hidden)
        last = [
            (zeros, zeros) if state is None else (state.layers[k][0][b], state.layers[k][1][b])
            for k in range(count)
        ]
        fed = zeros if state is None else state.output[b]
        row, attention_row = [], []
        for t in range(inputs.shape[1]):
            x = torch.cat([inputs[b, t], fed]) if input_feeding else inputs[b, t]
            step_masks = [None if mask is None else mask[b, t] for mask in masks or [None] * count]
            h = naive_stack(x, weights.layers, last, residual, step_masks)
            query = h if weights.query is None else weights.query @ h
            context, attention = naive_attend(query, keys[b], values[b], length, score)
            bias = 0.0 if weights.combine_bias is None else weights.combine_bias
            fed = (weights.combine @ torch.cat([h, context]) + bias).tanh()
            row.append(fed)
            attention_row.append(attention)
        outputs.append(torch.stack(row))
        attentions.append(torch.stack(attention_row))
        lasts.append(last)
        fed_rows.append(fed)
    layers = tuple(
        (torch.stack([last[k][0] for last in lasts]), torch.stack([last[k][1] for last in lasts]))
        for k in range(count)
    )
    return torch.stack(outputs), torch.stack(attentions), AttentionalLSTMState(layers, torch.stack(fed_rows))
