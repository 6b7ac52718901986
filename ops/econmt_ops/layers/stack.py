"""Runs a stack of layers: reversal of rows, dropout and residual sums between layers.

B batch, T steps, I input size, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from econmt_ops.core.dropout import Seed
from econmt_ops.core.dropout import dropout as drop_units
from econmt_ops.core.lengths import reverse_rows
from econmt_ops.core.weights import State


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
    """Returns the outputs (B, T, H) and the states of a stack; the arguments are those of an op."""

    def turned(sequence: Tensor) -> Tensor:
        return reverse_rows(sequence, lengths) if reverse else sequence

    read = turned(inputs)
    last = []
    for number, (weights, first) in enumerate(zip(layers, state, strict=True)):
        if number > 0 and dropout > 0.0:
            assert dropout_seed is not None
            # Masks are indexed by position, in either direction.
            read = turned(drop_units(turned(read), dropout, dropout_seed, variational, number))
        outputs, after = run_layer(read, weights, first, lengths)
        last.append(after)
        read = outputs + read if residual and number > 0 else outputs
    return turned(read), tuple(last)
