"""Arguments of the persistent LSTM layer operator, and its weights cast to the types of the products.

Sizes: D directions, B batch, T steps, I input size, H hidden. Time is the first axis.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.alignment import widened


class PersistentLayer(NamedTuple):
    """Arguments of a layer; lists have one entry per direction."""

    inputs: Tensor
    """(T, B, I); with ``places`` the distinct rows (N, I)."""
    weights: list[Tensor]
    """(4H, I), of any type; products are in the type of the inputs."""
    recurrents: list[Tensor]
    """(4H, H)"""
    biases: list[Tensor]
    """(4H,)"""
    first_h: list[Tensor]
    """(B, H), or an empty list: the initial state is zero."""
    first_c: list[Tensor]
    """(B, H) float32, or an empty list."""
    lengths: Tensor | None
    """(B,)"""
    places: Tensor | None
    """(T, B), row index of each position."""
    reverse: list[bool]
    stash: str
    products: str
    """Type of the products in the recurrence: "bfloat16", "float16" or "float32"."""
    together: str
    """"yes" or "no": both directions share a launch or not; "auto" decides by the launch plan."""
    gate_gradient: Tensor | None = None
    """(T, B, 4H), see `econmt_ops.lstm`; requires one direction and no ``places``."""


def sizes(layer: PersistentLayer) -> tuple[int, int, int, int]:
    """Returns D, T, B and H."""
    steps, batch = (layer.inputs if layer.places is None else layer.places).shape[:2]
    return len(layer.recurrents), steps, batch, layer.recurrents[0].shape[1]


class CastWeights:
    """Matrices of a layer in the types of its products, cast at first use.

    Attributes:
        layer: arguments of the layer.
    """

    def __init__(self, layer: PersistentLayer) -> None:
        self.layer = layer
        self._inputs: dict[int, Tensor] = {}

    def input(self, number: int) -> Tensor:
        """Returns the input matrix (4H, I) of a direction, padded to an aligned width."""
        if number not in self._inputs:
            self._inputs[number] = widened(self.layer.weights[number], self.layer.inputs.dtype)
        return self._inputs[number]

    @cached_property
    def recurrents(self) -> Tensor:
        """Recurrent matrices (D, 4H, H) in the type of the recurrent products."""
        dtype = getattr(torch, self.layer.products)
        if len(self.layer.recurrents) == 1:  # no copy if it has this type already
            return self.layer.recurrents[0].to(dtype).contiguous().unsqueeze(0)
        directions, _, _, hidden = sizes(self.layer)
        made = self.layer.inputs.new_empty(directions, 4 * hidden, hidden, dtype=dtype)
        for part, recurrent in zip(made, self.layer.recurrents, strict=True):
            part.copy_(recurrent)
        return made

    def recurrent(self, number: int) -> Tensor:
        """Returns the recurrent matrix (4H, H) of a direction in the type of the inputs."""
        dtype = self.layer.inputs.dtype
        if getattr(torch, self.layer.products) == dtype:
            return self.recurrents[number]
        return self.layer.recurrents[number].to(dtype)
