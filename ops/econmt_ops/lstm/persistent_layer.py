"""Arguments of the persistent LSTM layer operator, and its weights cast to the types of the products.

Sizes: D directions, B batch, T steps, I input size, H hidden. Time is the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.alignment import even


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


class Prepared:
    """Inputs of a layer's recurrence and products, prepared by one launch for each direction.

    Args:
        layer: the arguments of the layer.
        dtype: compute type.
        zeros: number of zeros that ``workspace`` begins with.
        more: number of further integers of the workspace.
        rows: inputs as they are multiplied, if they are known already.
        other_biases: second biases, (4H,) each, one a direction or none.
        back: True in the backward pass, which needs no bias.

    Attributes:
        rows: inputs as they are multiplied with the input weights, (T B, I'), or the distinct rows (N, I').
        weights: input weights (4H, I') in the compute type, one a direction; I' is I widened.
        recurrents: recurrent weights (D, 4H, H) in the type of the recurrence's products.
        biases: biases (4H,) in the compute type, one a direction; none in the backward pass.
        workspace: int32 on the layer's device.
    """

    def __init__(
        self,
        layer: PersistentLayer,
        dtype: torch.dtype,
        zeros: int,
        more: int = 0,
        *,
        rows: Tensor | None = None,
        other_biases: Sequence[Tensor] = (),
        back: bool = False,
    ) -> None:
        from econmt_ops.backends.triton.layer_kernels import prepare

        self.layer = layer
        self._products: torch.dtype = getattr(torch, layer.products)
        hidden = layer.recurrents[0].shape[1]
        inputs = layer.inputs if layer.inputs.dim() == 3 else layer.inputs.unsqueeze(1)
        wide = even(inputs.shape[2], dtype)
        read = None
        if rows is None:
            if inputs.dtype == dtype and wide == inputs.shape[2] and inputs.is_contiguous():
                rows = inputs.view(-1, wide)
            else:
                read = inputs if inputs.stride(2) == 1 else inputs.contiguous()
                rows = inputs.new_empty(inputs.shape[0] * inputs.shape[1], wide, dtype=dtype)
        self.rows = rows
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []
        self.workspace = inputs.new_empty(zeros + more, dtype=torch.int32)
        first, *others = layer.recurrents
        # Weights that nothing has to be done with are read where they are.
        self._casts = bool(others) or first.dtype != self._products or not first.is_contiguous()
        if self._casts:
            self.recurrents = first.new_empty(1 + len(others), *first.shape, dtype=self._products)
        else:
            self.recurrents = first.unsqueeze(0)
        for number, (weight, recurrent) in enumerate(zip(layer.weights, layer.recurrents, strict=True)):
            matrix: tuple[Tensor, Tensor] | None = None
            square: tuple[Tensor, Tensor] | None = None
            bias: Tensor | None = None
            if weight.dtype != dtype or wide != weight.shape[1]:
                matrix = weight, weight.new_empty(len(weight), wide, dtype=dtype)
            if self._casts:
                square = recurrent, self.recurrents[number]
            own: tuple[Tensor, ...] = ()
            if not back:
                own = (layer.biases[number], *other_biases[number : number + 1])
                bias = own[0]
                if len(own) > 1 or bias.dtype != dtype:
                    bias = own[0].new_empty(4 * hidden, dtype=dtype)
                else:
                    own = ()
                self.biases.append(bias)
            is_first = number == 0
            if matrix or square or own or (is_first and (read is not None or zeros)):
                prepare(
                    read if is_first else None,
                    rows if is_first and read is not None else None,
                    matrix,
                    square,
                    own,
                    bias if own else None,
                    self.workspace,
                    zeros if is_first else 0,
                    hidden,
                )
            self.weights.append(weight if matrix is None else matrix[1])

    def recurrent(self, number: int) -> Tensor:
        """Returns the recurrent weights of a direction (4H, H) in the compute type."""
        dtype = self.rows.dtype
        return self.recurrents[number] if self._products == dtype else self.layer.recurrents[number].to(dtype)


class WorkspaceOfBiases:
    """Layout of counters and partial sums of the bias gradients in a layer's workspace.

    Args:
        counters: number of integers before them.
        directions: D.
        width: 4H.
        needed: True if there are such gradients.

    Attributes:
        needed: see above.
        zeros: number of integers that have to be zero at first, those before included.
        more: number of further integers.
    """

    def __init__(self, counters: int, directions: int, width: int, needed: bool) -> None:
        from econmt_ops.backends.triton.layer_kernels import PARTIALS, counters_of_sums

        self.needed = needed
        self._begin, self._each = counters, counters_of_sums(width)
        self.zeros = counters + (directions * self._each if needed else 0)
        self.more = PARTIALS * width if needed else 0

    def place(self, number: int) -> tuple[int, int]:
        """Returns where the counters and the partial sums of a direction begin."""
        return self._begin + number * self._each, self.zeros
