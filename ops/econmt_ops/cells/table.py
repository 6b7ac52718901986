"""Table of all recurrent cells by name."""

from __future__ import annotations

from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.protocol import Cell

CELLS: dict[str, Cell] = {"lstm": LSTM}
"""Cells by name: that of `econmt_ops.lstm`, and those that `econmt_ops.layers.op.LayerOp` adds. For an operation with
several kinds of weights it is the first kind (gates normalized together, a window of one step)."""

KINDS: dict[str, Cell] = {"lstm": LSTM}
"""Cells by name, with a name of its own for every further kind of weights."""
