"""Inputs with repeated rows, such as words: a batch holds a few hundred distinct ones at thousands of positions.

The product of an input and a weight is the same wherever the input occurs. So it is computed once for each of the N
distinct rows and then looked up; in the backward pass the gradients of a row's positions are summed before the
products. With x_p = X[k_p] at position p, W (4H, I) and the gradients dz_p of the gates:

    z_p = (X W^T + b)[k_p]          dZ[n] = sum over k_p = n of dz_p
    dX = dZ W                       dW = dZ^T X

The three products have N rows instead of B T.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import c as native
from econmt_ops.core.shapes import Shapes


class UniqueRows(NamedTuple):
    """Inputs (B, T, I) given as distinct rows and the index of the row at each position."""

    rows: Tensor
    """Distinct rows, (N, I)."""
    places: Tensor
    """Index of the row at each position, (B, T) int64, on the device of the rows; in [0, N) also at padded positions.
    """

    def expanded(self) -> Tensor:
        """Returns the inputs (B, T, I)."""
        return functional.embedding(self.places, self.rows)

    def to(self, dtype: torch.dtype) -> UniqueRows:
        """Returns the inputs with rows of another type."""
        return UniqueRows(self.rows.to(dtype), self.places)


Inputs = Union[Tensor, UniqueRows]
"""Inputs of a recurrent op: a tensor (B, T, I), or its distinct rows."""


def values_of(inputs: Inputs) -> Tensor:
    """Returns the tensor that determines type and device of the inputs."""
    return inputs.rows if isinstance(inputs, UniqueRows) else inputs


def expanded(inputs: Inputs) -> Tensor:
    """Returns the inputs as a tensor (B, T, I)."""
    return inputs.expanded() if isinstance(inputs, UniqueRows) else inputs


def check_inputs(check: Shapes, inputs: Inputs) -> None:
    """Checks the inputs of a recurrent op, and records the sizes B, T and I.

    Raises:
        ValueError: If a size or a type does not fit, or there is no position.
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
    check.bounded("inputs.places", inputs.places, check.sizes["N"] - 1)
    # N differs from batch to batch; without it all batches share one measurement.
    del check.sizes["N"]


def clean_rows(rows: Tensor, places: Tensor, padding: Tensor | None) -> Tensor:
    """Returns the rows (N, I) with zeros in those that only padded positions read.

    ``padding`` is True at these positions and has the shape of ``places``, or is None.
    """
    if padding is None:
        return rows
    read = (~padding).flatten().to(torch.float32)
    times = torch.zeros(len(rows), dtype=read.dtype, device=rows.device).index_add_(0, places.flatten(), read)
    return rows.masked_fill((times == 0.0).unsqueeze(1), 0.0)


def add_repeated(total: Tensor, places: Tensor, values: Tensor) -> None:
    """Adds values (K, B, M) to the rows of ``total`` (N, M) at the indices (K, B), in the type of ``total``."""
    if native.serves(values) and total.dtype == torch.float32:
        native.add_rows(total, values.reshape(-1, values.shape[2]), places.reshape(-1))
        return
    total.index_add_(0, places.reshape(-1), values.reshape(-1, values.shape[2]).to(total.dtype))
