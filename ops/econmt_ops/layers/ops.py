"""Operations of the cells' table."""

from __future__ import annotations

from econmt_ops.cells.table import LAYER_OPS
from econmt_ops.layers.op import LayerOp, layer_op

OPS: dict[str, LayerOp] = {name: layer_op(*entry) for name, entry in LAYER_OPS.items()}
"""Operations by name, all but `econmt_ops.lstm`."""
