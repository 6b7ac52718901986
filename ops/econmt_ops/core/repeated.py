"""Inputs that repeat: words, of which a batch holds some hundreds of different ones at some thousand positions.

What a layer makes of an input by a product alone, its share of the gates, is the same wherever the input stands. So it
is made once for each of the N rows and then looked up; in the backward pass the gradients of a row's positions are
summed before the products. With x_p = X[k_p] at position p, W (4H, I) and the gradients dz_p of the gates:

    z_p = (X W^T + b)[k_p]          dZ[n] = sum over k_p = n of dz_p
    dX = dZ W                       dW = dZ^T X

Three products of N rows instead of B T.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import c as native
from econmt_ops.core.shapes import Shapes


class UniqueRows(NamedTuple):
    """Inputs (B, T, I) given as distinct rows and which of them stands where."""

    rows: Tensor
    """(N, I)"""
    places: Tensor
    """(B, T) int64, on the device of the rows, from 0 to N - 1 also where padding is."""

    def expanded(self) -> Tensor:
        """The inputs (B, T, I)."""
        return functional.embedding(self.places, self.rows)

    def to(self, dtype: torch.dtype) -> UniqueRows:
        """The rows in another type."""
        return UniqueRows(self.rows.to(dtype), self.places)


Inputs = Union[Tensor, UniqueRows]
"""What a recurrent op reads: (B, T, I), or its distinct rows."""


def values_of(inputs: Inputs) -> Tensor:
    """The tensor whose type and device count."""
    return inputs.rows if isinstance(inputs, UniqueRows) else inputs


def expanded(inputs: Inputs) -> Tensor:
    """Inputs (B, T, I), however they are given."""
    return inputs.expanded() if isinstance(inputs, UniqueRows) else inputs


def check_inputs(check: Shapes, inputs: Inputs) -> None:
    """Checks what a recurrent op reads; B, T and I are learnt from it.

    Raises:
        ValueError: a size or a type does not fit, or there is no position.
    """
    if not isinstance(inputs, UniqueRows):
        check("inputs", inputs, "B T I")
        check.not_empty("inputs", inputs)
        return
    check("inputs.rows", inputs.rows, "N I")
    check.indices("inputs.places", inputs.places, "B T")
    check.not_empty("inputs.places", inputs.places)
    if inputs.places.device != inputs.rows.device:
        raise ValueError(
            f"{check.op}: inputs.places is on {inputs.places.device}, inputs.rows on {inputs.rows.device}"
        )
    check.bounded("inputs.places", inputs.places, 0, check.sizes["N"] - 1)
    # Another batch holds another number of rows: that is no other problem.
    del check.sizes["N"]


def clean_rows(rows: Tensor, places: Tensor, padding: Tensor | None) -> Tensor:
    """The rows (N, I), zero where only padded positions read them.

    Args:
        rows: (N, I). places, padding: of the same shape, any order.
    """
    if padding is None:
        return rows
    read = (~padding).flatten().to(torch.float32)
    times = torch.zeros(len(rows), dtype=read.dtype, device=rows.device).index_add_(0, places.flatten(), read)
    return rows.masked_fill((times == 0.0).unsqueeze(1), 0.0)


def look_up(table: Tensor, places: Tensor) -> Tensor:
    """The rows of a table (N, M) that an places (K, B) names: (K, B, M), a new tensor."""
    return table.index_select(0, places.reshape(-1)).view(*places.shape, table.shape[1])


def add_repeated(total: Tensor, places: Tensor, values: Tensor) -> None:
    """Adds values (K, B, M) to the rows of ``total`` (N, M) that the places (K, B) names, in the type of ``total``."""
    if native.serves(values) and total.dtype == torch.float32:
        native.add_rows(total, values.reshape(-1, values.shape[2]), places.reshape(-1))
        return
    total.index_add_(0, places.reshape(-1), values.reshape(-1, values.shape[2]).to(total.dtype))
