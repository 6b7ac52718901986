"""Operations of the cells' table."""

from __future__ import annotations

from econmt_ops.cells.table import LAYER_OPS
from econmt_ops.layers.op import LayerOp

OPS: dict[str, LayerOp] = {name: LayerOp(*entry) for name, entry in LAYER_OPS.items()}
"""Operations by name, all but `econmt_ops.lstm`."""
