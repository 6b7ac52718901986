"""The cells that a recipe can name: the op of each, and what encoder and decoder ask of it.

Shapes: B batch, S source positions, H hidden size of a direction, E encoder size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt.config.model import CELLS as CELL_RULES
from econmt_ops import bidirectional_lstm, final_state, lstm
from econmt_ops.cells import table
from econmt_ops.cells.protocol import Cell
from econmt_ops.core.repeated import Inputs
from econmt_ops.core.weights import State
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.layers.op import OPS

_INSTEAD = "recompute"
"""Implementation that runs where a cell's op lacks the one that the recipe names; it saves memory too."""


class RecipeCell:
    """Runs layers of a cell.

    Attributes:
        cell: its sizes and states.
        laid_out: whether a search has a step of its own for it, on weights laid out for it.
    """

    def __init__(self, cell: Cell, op: Any, *, prepacked: bool = False) -> None:
        self.cell, self.op, self.prepacked = cell, op, prepacked

    def how(self, given: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the op: those for an LSTM, with an implementation that it has."""
        name = given["implementation"]
        if name == "auto" or name in implementations_of(self.cell.name):
            return given
        return {**given, "implementation": _INSTEAD}

    def run(
        self, inputs: Inputs, stack: Sequence[Any], how: dict[str, Any], **options: Any
    ) -> tuple[Tensor, State]:
        """Layers of one direction, ``options`` as those of `econmt_ops.lstm`: outputs (B, S, H) and states."""
        result: tuple[Tensor, State] = self.op(inputs, tuple(stack), **options, **self.how(how))
        return result

    def last(self, outputs: Tensor, states: State, lengths: Tensor, reverse: bool) -> Tensor:  # noqa: ARG002
        """Returns the top layer's output at the last step (B, H), residual sum included, from :meth:`run`'s results."""
        return final_state(outputs, lengths=lengths, reverse=reverse)

    def run_both_ways(
        self, inputs: Inputs, pair: Sequence[Any], lengths: Tensor, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """A layer of two directions: outputs (B, S, E), and what the last step of each gives, (B, E)."""
        halves, ends = [], []
        for weights, reverse in zip(pair, (False, True), strict=True):
            half, states = self.run(inputs, (weights,), how, lengths=lengths, reverse=reverse)
            halves.append(half)
            ends.append(self.last(half, states, lengths, reverse))
        return torch.cat(halves, -1), torch.cat(ends, -1)


class LSTMLayers(RecipeCell):
    """The LSTM, whose layers of two directions are one op, and whose states hold h."""

    def last(self, outputs: Tensor, states: State, lengths: Tensor, reverse: bool) -> Tensor:  # noqa: ARG002
        """See :meth:`RecipeCell.last`; h alone."""
        return states[-1][0]

    def run_both_ways(
        self, inputs: Inputs, pair: Sequence[Any], lengths: Tensor, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`RecipeCell.run_both_ways`."""
        outputs, states = bidirectional_lstm(inputs, *pair, lengths=lengths, **how)
        return outputs, torch.cat([states[0][0], states[1][0]], dim=-1)


CELLS: dict[str, RecipeCell] = {
    name: LSTMLayers(table.CELLS[name], lstm, prepacked=True)
    if name == "lstm"
    else RecipeCell(table.CELLS[name], OPS[name])
    for name in CELL_RULES
}
"""By the names that recipes have for them; `econmt.config.model.CELLS` has what can be asked of each there."""
