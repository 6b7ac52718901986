"""A layer of an LSTM as its operator on a GPU has it: the arguments, and the weights in the types of the products.

Shapes: D directions, B batch, T steps, I input size, H hidden. Time comes first.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.alignment import widened


class PersistentLayer(NamedTuple):
    """The arguments of a layer; lists have one entry a direction."""

    inputs: Tensor
    """(T, B, I); with places the distinct rows (N, I)."""
    weights: list[Tensor]
    """(4H, I), of any type: products are made in that of the inputs."""
    recurrents: list[Tensor]
    """(4H, H)"""
    biases: list[Tensor]
    """(4H,)"""
    first_h: list[Tensor]
    """(B, H), or nothing: the first state is zero."""
    first_c: list[Tensor]
    """(B, H) float32, or nothing."""
    lengths: Tensor | None
    """(B,)"""
    places: Tensor | None
    """(T, B), which row stands where."""
    reverse: list[bool]
    stash: str
    products: str
    """The type of the products in the recurrence, "bfloat16", "float16" or "float32"."""
    together: str
    """Whether two directions share a launch: "yes", "no" or "auto"."""
    gate_gradient: Tensor | None = None
    """(T, B, 4H), see `econmt_ops.lstm`; there is one direction then, and no places."""


def sizes(layer: PersistentLayer) -> tuple[int, int, int, int]:
    """D, T, B and H."""
    steps, batch = (layer.inputs if layer.places is None else layer.places).shape[:2]
    return len(layer.recurrents), steps, batch, layer.recurrents[0].shape[1]


class CastWeights:
    """The matrices of a layer in the types of its products, made when they are first asked for.

    Attributes:
        layer: whose they are.
    """

    def __init__(self, layer: PersistentLayer) -> None:
        self.layer = layer
        self._inputs: dict[int, Tensor] = {}

    def input(self, number: int) -> Tensor:
        """That of the inputs (4H, I), of a direction, widened."""
        if number not in self._inputs:
            self._inputs[number] = widened(self.layer.weights[number], self.layer.inputs.dtype)
        return self._inputs[number]

    @cached_property
    def recurrents(self) -> Tensor:
        """(D, 4H, H) as the walk multiplies with them."""
        dtype = getattr(torch, self.layer.products)
        if len(self.layer.recurrents) == 1:  # what is of that type already is not copied
            return self.layer.recurrents[0].to(dtype).contiguous().unsqueeze(0)
        directions, _, _, hidden = sizes(self.layer)
        made = self.layer.inputs.new_empty(directions, 4 * hidden, hidden, dtype=dtype)
        for part, recurrent in zip(made, self.layer.recurrents, strict=True):
            part.copy_(recurrent)
        return made

    def recurrent(self, number: int) -> Tensor:
        """That of a direction (4H, H), in the type of the inputs."""
        dtype = self.layer.inputs.dtype
        if getattr(torch, self.layer.products) == dtype:
            return self.recurrents[number]
        return self.layer.recurrents[number].to(dtype)
