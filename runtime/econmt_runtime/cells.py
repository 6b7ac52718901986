"""Cells that the C library runs, and the layers of encoders; econmt_ops documents the equations."""

from __future__ import annotations

from typing import NamedTuple

from econmt_runtime.arrays import Arrays, RuntimeProduct
from econmt_runtime.library import Floats


class RuntimeCell(NamedTuple):
    """Features of a cell of H values.

    Attributes:
        number: Number of the cell in the C library.
        gates: Rows of its weights, a multiple of H.
        states: Number of states from the encoder.
        hidden: True if it has a product with the state h.
        adds: True if that and the product with its input are added, and can be one.
        vectors: Values of its layer normalization, a multiple of H.
    """

    number: int
    gates: int
    states: int
    hidden: bool = True
    adds: bool = False
    vectors: int = 0


CELLS = {
    "lstm": RuntimeCell(0, 4, 2, adds=True),
    "gru": RuntimeCell(1, 3, 1),
    "ssru": RuntimeCell(2, 2, 1, hidden=False),
    "lnlstm": RuntimeCell(3, 4, 2, vectors=14),
    "lnglstm": RuntimeCell(4, 4, 2, adds=True, vectors=10),
}
"""Cells by name."""


class RuntimeLayer(NamedTuple):
    """Layer of an encoder in one direction: products with its input and state, and vectors of a layer normalization."""

    read: RuntimeProduct
    recur: RuntimeProduct | None
    vectors: Floats | None

    @classmethod
    def named(cls, arrays: Arrays, name: str, cell: RuntimeCell) -> RuntimeLayer:
        """Creates the layer of the arrays whose names begin with ``name``."""
        recur = RuntimeProduct.named(arrays, f"{name}.recur") if cell.hidden else None
        vectors = arrays[f"{name}.vectors"] if cell.vectors else None
        return cls(RuntimeProduct.named(arrays, f"{name}.read"), recur, vectors)
