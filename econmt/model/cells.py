"""Recurrent cells of recipes: how encoder and decoder run the layers of each cell.

Shapes: B batch, S source positions, H hidden size of a direction, E encoder size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt.config.stacks import CELLS as CELL_RULES
from econmt_ops import bidirectional_lstm, final_state, lstm
from econmt_ops.cells.protocol import Cell
from econmt_ops.cells.scan import ScanLayer
from econmt_ops.cells.table import KINDS
from econmt_ops.core.weights import State
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.layers.op import OPS
from econmt_ops.products.repeated import Inputs, values_of

_FALLBACK = "recompute"
"""Implementation of a cell whose operation lacks the one that the recipe names; it saves memory too."""


class RecipeCell:
    """Runs layers of a cell."""

    def __init__(self, cell: Cell, op: Any) -> None:
        self.cell, self.op = cell, op

    def how(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns keyword arguments of an LSTM with an implementation that the cell's operation has."""
        name = options["implementation"]
        if name == "auto" or name in implementations_of(self.cell.name):
            return options
        return {**options, "implementation": _FALLBACK}

    def run(
        self, inputs: Inputs, stack: Sequence[Any], how: dict[str, Any], size: int = 0, **options: Any
    ) -> tuple[Tensor, State]:
        """Runs layers of one direction; ``options`` as in ``econmt_ops.lstm``. Returns outputs (B, S, H) and states.

        ``size`` is H, for layers from zero states.
        """
        if size and self.cell.name == "sru":  # its weights may fit two sizes, of which a state is one
            zeros = values_of(inputs).new_zeros(len(options["lengths"]), size)
            options["state"] = ((zeros,),) * len(stack)
        result: tuple[Tensor, State] = self.op(inputs, tuple(stack), **options, **self.how(how))
        return result

    def last(
        self, outputs: Tensor, states: State, lengths: Tensor, reverse: bool, residual: bool = False
    ) -> Tensor:
        """Returns the last output of the top layer (B, H), of an LSTM without the residual sum, after :meth:`run`."""
        if self.cell.name == "lstm" or not (residual or isinstance(self.cell, ScanLayer)):
            return states[-1][0]
        return final_state(outputs, lengths=lengths, reverse=reverse)

    def run_both_ways(
        self, inputs: Inputs, pair: Sequence[Any], lengths: Tensor, how: dict[str, Any], size: int
    ) -> tuple[Tensor, Tensor]:
        """Runs a bidirectional layer. Returns outputs (B, S, E) and the outputs of the last steps (B, E)."""
        halves, ends = [], []
        for weights, reverse in zip(pair, (False, True), strict=True):
            half, states = self.run(inputs, (weights,), how, size, lengths=lengths, reverse=reverse)
            halves.append(half)
            ends.append(self.last(half, states, lengths, reverse))
        return torch.cat(halves, -1), torch.cat(ends, -1)


class LSTMLayers(RecipeCell):
    """Runs LSTM layers; a bidirectional layer is one operation."""

    def run_both_ways(
        self,
        inputs: Inputs,
        pair: Sequence[Any],
        lengths: Tensor,
        how: dict[str, Any],
        size: int,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`RecipeCell.run_both_ways`."""
        outputs, states = bidirectional_lstm(inputs, *pair, lengths=lengths, **how)
        return outputs, torch.cat([states[0][0], states[1][0]], dim=-1)


CELLS: dict[str, RecipeCell] = {
    name: LSTMLayers(cell, lstm) if name == "lstm" else RecipeCell(cell, OPS[cell.name])
    for name, cell in ((name, KINDS[name]) for name in CELL_RULES)
}
"""All cells by their names in recipes; :data:`econmt.config.stacks.CELLS` has the features of each."""
