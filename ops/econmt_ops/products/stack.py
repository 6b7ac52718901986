"""Runs a stack of layers: reversal of rows, dropout and residual sums between layers.

B batch, T steps, I input size, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from econmt_ops.core.weights import State
from econmt_ops.products.dropout import Seed, keep_mask
from econmt_ops.products.dropout import dropout as drop_units
from econmt_ops.products.reversal import reverse_rows

After = TypeVar("After")


class StackOptions(NamedTuple):
    """Options of a stack of recurrent layers, complete and checked.

    Attributes:
        lengths, reverse, residual, dropout, variational: See `econmt_ops.lstm`, for layers alone.
        seed: Seed of the masks, or None without dropout.
        from_zero: True if all initial states are zero, so that they need not be read.
        gate_gradient: See `econmt_ops.lstm`; None for other cells.
        both_ways: True if two LSTM layers are one in both directions, from zero states.
    """

    lengths: Tensor | None = None
    reverse: bool = False
    residual: bool = False
    dropout: float = 0.0
    seed: Seed | None = None
    variational: bool = False
    from_zero: bool = False
    gate_gradient: Tensor | None = None
    both_ways: bool = False

    def keep_masks(
        self, layers: int, shape: tuple[int, int, int], device: torch.device
    ) -> list[Tensor | None]:
        """Returns the keep mask of each layer's input: of its ``shape`` (B, T, H), or (B, 1, H) if variational.

        The bottom layer has None. Layer k (counted from 0) draws from `derive_seed(seed, k)`; masks are indexed by
        position, in whichever direction the stack runs.
        """
        if self.dropout == 0.0:
            return [None] * layers
        assert self.seed is not None
        batch, steps, hidden = shape
        masked = batch, 1 if self.variational else steps, hidden
        return [None] + [
            keep_mask(masked, self.dropout, self.seed, device, layer) for layer in range(1, layers)
        ]

    def drop(self, values: Tensor, number: int) -> Tensor:
        """Applies dropout to the input (B, T, H) of a layer; its mask is generated again in the backward pass."""
        assert self.seed is not None
        return drop_units(values, self.dropout, self.seed, self.variational, number)


def last_of(sequence: Tensor, first: Tensor, lengths: Tensor | None) -> Tensor:
    """Returns the value (B, H) of a sequence (B, T, H) at each row's last position; ``first`` (B, H) for empty rows."""
    if lengths is None:
        return sequence[:, -1].clone()  # a view would change with the sequence, and keep all of it
    lengths = lengths.to(sequence.device, non_blocking=True).unsqueeze(1)
    index = lengths.clamp(1, sequence.shape[1]).sub(1).unsqueeze(2).expand(-1, 1, sequence.shape[2])
    return torch.where(lengths > 0, sequence.gather(1, index).squeeze(1), first)


def run_stack(
    run_layer: Callable[[int, Any], tuple[Tensor, After]],
    inputs: Any,
    count: int,
    options: StackOptions,
    *,
    reverses: bool = False,
    drop: Callable[[Tensor, int], Tensor] | None = None,
) -> tuple[Tensor, list[After]]:
    """Runs layers one above the other; returns the outputs (B, T, H) of the top one and the state of every layer.

    Args:
        run_layer: Runs a layer, which it gets by number, on its inputs; returns outputs (B, T, H) and a state.
        inputs: Inputs of the bottom layer, in the form that ``run_layer`` reads. count: Number of layers.
        options: Lengths, dropout and residual sums.
        reverses: True to run the layers over rows that are reversed in memory. Masks are indexed by position, so they
            are applied to rows in the original order.
        drop: Applies dropout to the input of a layer, which it gets by number; `StackOptions.drop` by default.
    """
    drop = drop or options.drop

    def in_order(rows: Any) -> Any:
        """Reverses rows, or undoes it."""
        return reverse_rows(rows, options.lengths) if reverses else rows

    read = in_order(inputs)
    states = []
    for number in range(count):
        if number > 0 and options.dropout > 0.0:
            read = in_order(drop(in_order(read), number))
        outputs, after = run_layer(number, read)
        states.append(after)
        read = outputs + read if options.residual and number > 0 else outputs
    return in_order(read), states


def run_cells(
    run_layer: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    inputs: Tensor,
    layers: tuple[Any, ...],
    state: State,
    options: StackOptions,
    **how: str,
) -> tuple[Tensor, State]:
    """Returns the outputs (B, T, H) and the states of a stack of cells whose rows are reversed in memory.

    ``run_layer`` runs one layer over whole sequences, in forward direction. It takes inputs (B, T, I), arbitrary at and
    after a row's length, the layer's weights, the states before the first step, lengths (B,) or None, and ``how``; and
    returns outputs (B, T, H), zero at and after a row's length, and the states after each row's last step.
    """
    outputs, states = run_stack(
        lambda number, read: run_layer(read, layers[number], state[number], options.lengths, **how),
        inputs,
        len(layers),
        options,
        reverses=options.reverse,
    )
    return outputs, tuple(states)
