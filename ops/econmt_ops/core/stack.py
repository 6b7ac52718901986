"""Runs a stack of layers: reversal of rows, dropout and residual sums between layers.

B batch, T steps, I input size, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from econmt_ops.core.dropout import Seed
from econmt_ops.core.dropout import dropout as drop_units
from econmt_ops.core.lengths import reverse_rows
from econmt_ops.core.weights import State

After = TypeVar("After")


class StackOptions(NamedTuple):
    """Options of the layers above the bottom one.

    Attributes:
        residual: True if each of them adds its input to its output.
        dropout: Dropout probability of their inputs. seed: Seed of the masks, or None without dropout.
        variational: True if one mask per row and layer serves all time steps.
    """

    residual: bool = False
    dropout: float = 0.0
    seed: Seed | None = None
    variational: bool = False

    def drop(self, values: Tensor, number: int) -> Tensor:
        """Applies dropout to the input (B, T, H) of a layer; its mask is generated again in the backward pass."""
        assert self.seed is not None
        return drop_units(values, self.dropout, self.seed, self.variational, number)


class RunLayer(Protocol):
    """Function that runs one layer over whole sequences, in forward direction."""

    def __call__(
        self, inputs: Tensor, weights: Any, state: Sequence[Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the outputs (B, T, H), zero at and after a row's length, and the states after each row's last step.

        Args:
            inputs: (B, T, I); values at and after a row's length are arbitrary.
            weights: Weights of the layer. state: States before the first step. lengths: (B,), or None.
        """


def last_of(sequence: Tensor, first: Tensor, lengths: Tensor | None) -> Tensor:
    """Returns the value (B, H) of a sequence (B, T, H) at each row's last position; ``first`` (B, H) for empty rows."""
    if lengths is None:
        return sequence[:, -1]
    lengths = lengths.to(sequence.device, non_blocking=True).unsqueeze(1)
    index = lengths.clamp(1, sequence.shape[1]).sub(1).unsqueeze(2).expand(-1, 1, sequence.shape[2])
    return torch.where(lengths > 0, sequence.gather(1, index).squeeze(1), first)


def run_stack(
    run_layer: Callable[[int, Any], tuple[Tensor, After]],
    inputs: Any,
    count: int,
    options: StackOptions,
    *,
    turn: Callable[[Tensor], Tensor] | None = None,
    drop: Callable[[Tensor, int], Tensor] | None = None,
) -> tuple[Tensor, list[After]]:
    """Runs layers one above the other, with dropout and residual sums between them.

    Args:
        run_layer: Runs a layer, which it gets by number, on its inputs; returns outputs (B, T, H) and a state.
        inputs: Inputs of the bottom layer, in the form that ``run_layer`` reads. count: Number of layers.
        options: Dropout and residual sums.
        turn: Reverses rows in memory if the layers run over reversed rows. Masks are indexed by position, so they are
            applied to rows in the original order.
        drop: Applies dropout to the input of a layer, which it gets by number; `StackOptions.drop` by default.

    Returns:
        Outputs (B, T, H) of the top layer, in the original order, and the state of every layer.
    """
    drop = drop or options.drop
    read = inputs if turn is None else turn(inputs)
    states = []
    for number in range(count):
        if number > 0 and options.dropout > 0.0:
            read = drop(read, number) if turn is None else turn(drop(turn(read), number))
        outputs, after = run_layer(number, read)
        states.append(after)
        read = outputs + read if options.residual and number > 0 else outputs
    return read if turn is None else turn(read), states


def run_cells(
    run_layer: RunLayer,
    inputs: Tensor,
    layers: tuple[Any, ...],
    *,
    state: State,
    lengths: Tensor | None,
    reverse: bool,
    residual: bool,
    dropout: float,
    dropout_seed: Seed | None,
    variational: bool,
) -> tuple[Tensor, State]:
    """Returns the outputs (B, T, H) and the states of a stack of cells; the arguments are those of an op."""
    outputs, states = run_stack(
        lambda number, read: run_layer(read, layers[number], state[number], lengths),
        inputs,
        len(layers),
        StackOptions(residual, dropout, dropout_seed, variational),
        turn=functools.partial(reverse_rows, lengths=lengths) if reverse else None,
    )
    return outputs, tuple(states)
