"""Table of all recurrent cells by name."""

from __future__ import annotations

from econmt_ops.cells.gru import GRU
from econmt_ops.cells.lnlstm import LNLSTM
from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.protocol import Cell
from econmt_ops.cells.scan import GILR_LSTM, MIN_GRU, MIN_LSTM, QRNN, SRU, SSRU

_ALL: tuple[Cell, ...] = (LSTM, LNLSTM, GRU, SRU, SSRU, QRNN, GILR_LSTM, MIN_GRU, MIN_LSTM)
CELLS: dict[str, Cell] = {cell.name: cell for cell in _ALL}
"""Cells by name; for a cell with several kinds of weights the first kind (gates normalized together, a window of one
step)."""
