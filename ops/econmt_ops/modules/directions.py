"""Stacks of layers that run in one direction or in both, layer by layer where a single call of an op cannot.

D directions, L layers, B batch, T steps, H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.weights import State
from econmt_ops.products.stack import StackOptions, run_stack

RunBothWays = Callable[[Tensor, tuple[Any, ...], "Tensor | None", str], tuple[Tensor, State]]
"""Function of one layer in both directions from zero states: inputs, weights, lengths, implementation."""

Prepare = Callable[[Tensor, tuple[Any, ...]], tuple[Tensor, tuple[Any, ...]]]
"""Function that changes what a layer reads, (B, T, .), together with its weights."""


class StackedLayers:
    """Mixin of modules with layers in one direction or in both, whose parameters have the suffixes of `torch.nn`."""

    num_layers: int
    bidirectional: bool

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse") if self.bidirectional else (f"_l{layer}",)

    def _weights(self, layer: int, reverse: bool = False) -> Any:
        """Returns the weights of one layer in one direction as the op takes them."""
        return self.layer_weights(layer, reverse)  # type: ignore[attr-defined]  # each module describes its own

    def _layers(self) -> tuple[tuple[Any, ...], ...]:
        """Returns for each layer, bottom first, the weights of its directions."""
        return tuple(
            tuple([self._weights(layer, bool(reverse)) for reverse in range(1 + self.bidirectional)])
            for layer in range(self.num_layers)
        )


class LayerStack(NamedTuple):
    """Layers of one cell with the op that runs them.

    Attributes:
        op: Operation such as `econmt_ops.lstm`.
        weights: For each layer, bottom first, the weights of its directions.
        implementation: "auto" or the name of an implementation.
        both_ways: Faster way to run a layer in both directions from zero states; None if there is none.
    """

    op: Any
    weights: tuple[tuple[Any, ...], ...]
    implementation: str
    both_ways: RunBothWays | None = None

    def run_layer(
        self, read: Tensor, weights: tuple[Any, ...], state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """Runs one layer; returns outputs (B, T, D H) and the states of each direction."""
        if state is None and self.both_ways is not None and len(weights) == 2:
            return self.both_ways(read, weights, lengths, self.implementation)
        results = [
            self.op(
                read,
                (part,),
                state=None if state is None else (state[reverse],),
                lengths=lengths,
                reverse=bool(reverse),
                implementation=self.implementation,
            )
            for reverse, part in enumerate(weights)
        ]
        outputs = [made for made, _ in results]
        last = tuple(after for _, (after,) in results)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), last


def run_layers(
    stack: LayerStack,
    inputs: Tensor,
    state: State | None,
    options: StackOptions,
    prepare: Prepare | None = None,
) -> tuple[Tensor, State]:
    """Runs a stack over a batch of sequences.

    Args:
        stack: Layers and their op.
        inputs: (B, T, I).
        state: Initial states, a tuple per layer and direction, (B, H) each, the directions of a layer one after the
            other; None for zeros.
        options: Lengths, dropout and residual sums. A dropout probability of 1 is allowed.
        prepare: Called for each layer before it runs.

    Returns:
        Outputs (B, T, D H) and the states after each row's last step, ordered as ``state``.

    Raises:
        ValueError: If the number of states does not fit.
    """
    directions, drops_all = len(stack.weights[0]), options.dropout == 1.0
    count = directions * len(stack.weights)
    if state is not None and len(state) != count:
        wanted = f"state must have {count} entries, one per layer and direction"
        raise ValueError(f"{stack.op.__name__}: {wanted}, got {len(state)}")
    if directions == 1 and prepare is None and not drops_all:
        return stack.op(  # type: ignore[no-any-return]
            inputs,
            tuple(weights for (weights,) in stack.weights),
            state=state,
            lengths=options.lengths,
            residual=options.residual,
            dropout=options.dropout,
            dropout_seed=options.seed,
            variational=options.variational,
            implementation=stack.implementation,
        )

    def run(layer: int, read: Tensor) -> tuple[Tensor, State]:
        first = None if state is None else state[directions * layer : directions * (layer + 1)]
        weights = stack.weights[layer]
        if prepare is not None:
            read, weights = prepare(read, weights)
        return stack.run_layer(read, weights, first, options.lengths)

    drop = (lambda read, _: torch.zeros_like(read)) if drops_all else None
    outputs, last = run_stack(run, inputs, len(stack.weights), options, drop=drop)
    return outputs, tuple(itertools.chain.from_iterable(last))
