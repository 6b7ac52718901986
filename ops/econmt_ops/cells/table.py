"""Table of all recurrent cells by name."""

from __future__ import annotations

from typing import Any

from econmt_ops.cells.gru import GRU
from econmt_ops.cells.lnlstm import LNLSTM, LNLSTM_PER_GATE
from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.protocol import Cell
from econmt_ops.core.weights import LowRankLSTMWeights

KINDS: dict[str, Cell] = {"lstm": LSTM}
"""Cells by name: that of `econmt_ops.lstm`, and those that `econmt_ops.layers.op.LayerOp` adds. The first kind of an
operation's weights (gates normalized together, a window of one step) has its name, every other a name of its own."""

_CELL_OF: dict[type[Any], Any] = {
    **{cell.weights: cell for cell in (LSTM, GRU, LNLSTM, LNLSTM_PER_GATE)},
    LowRankLSTMWeights: LSTM,
}


def cell_of(weights: Any) -> Any:
    """Returns the cell to which the weights of a layer belong: the LSTM, or a `StepCell`."""
    return _CELL_OF[type(weights)]
