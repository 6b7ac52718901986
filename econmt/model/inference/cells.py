"""One decoder step of a layer of any cell except the LSTM, with prepacked weights.

Shapes: R rows, I input size, H hidden size, P output width of the product with the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from econmt.model.inference.layout import Gates, value_type
from econmt_ops.cells.protocol import Cell, StepCell
from econmt_ops.cells.scan import ScanCell, ScanLayer, SurrogateLayer
from econmt_ops.core.precision import accumulate_dtype


class LayerStep(Protocol):
    """Interface of one decoder step of a layer.

    Attributes:
        read: product with the inputs (R, I), which gives their share (R, P) of the layer's pre-activations.
        width: P.
    """

    read: Gates
    width: int

    def __call__(
        self, share: Tensor, read: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the layer's output (R, H), in the type of products, and its states after the step.

        ``share`` (R, P) is the result of :attr:`read` for the inputs ``read`` (R, I).
        """


def layer_step(cell: Cell, weights: Any, dtype: torch.dtype) -> LayerStep:
    """Creates the step of a layer whose products have the type ``dtype``."""
    if isinstance(cell, SurrogateLayer):
        return _SurrogateStep(cell, weights, dtype)
    if isinstance(cell, ScanLayer):
        return _ScanStep(cell.cell, weights, dtype)
    return _RecurrentStep(cell, weights, dtype)  # type: ignore[arg-type]  # the cells are of these kinds


def _advance(cell: ScanCell, products: Tensor, read: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Computes h and c of a step of a linear recurrence, in the type of c."""
    parts, decay, inputs = cell.start(products.to(before.dtype), before.shape[1])
    c = torch.addcmul(inputs, decay, before)
    return cell.finish(parts, c, read), c


class _ScanStep:
    def __init__(self, cell: ScanCell, weights: Any, dtype: torch.dtype) -> None:
        self.cell = cell
        self.read, self.width = Gates([weights.input], weights.bias, dtype), len(weights.bias)

    def __call__(
        self, share: Tensor, read: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        h, c = _advance(self.cell, share, read, state[0])
        return h.to(share.dtype), (c,)


class _SurrogateStep:
    def __init__(self, layer: SurrogateLayer, weights: Any, dtype: torch.dtype) -> None:
        self.layer = layer
        matrix = torch.cat([weights.surrogate, weights.input])
        bias = torch.cat([weights.surrogate_bias, weights.bias])
        self.read, self.width = Gates([matrix], bias, dtype), len(bias)
        self.below = len(weights.surrogate_bias)
        self.recur = Gates([weights.hidden], None, dtype)

    def __call__(
        self, share: Tensor, read: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        before, c = state
        _, s = _advance(self.layer.surrogate, share[:, : self.below], read, before)
        products = self.recur(before.to(share.dtype), start=share[:, self.below :].contiguous())
        h, c = _advance(self.layer.cell, products, read, c)
        return h.to(share.dtype), (s, c)


class _RecurrentStep:
    def __init__(self, cell: StepCell, weights: Any, dtype: torch.dtype) -> None:
        self.cell = cell
        parts = cell.split(weights)
        self.read, self.width = Gates([parts.input], parts.read_bias, dtype), len(parts.input)
        self.recur = Gates([parts.hidden], parts.recurrent_bias, dtype)
        values = value_type(dtype)
        exact = accumulate_dtype(values)
        self.extra = [part.detach().to(values).to(exact) for part in parts.extra]

    def __call__(
        self,
        share: Tensor,
        read: Tensor,  # noqa: ARG002  only its share is needed
        state: Sequence[Tensor],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        after = self.cell.forward(share, self.recur(state[0].to(share.dtype)), state, self.extra)
        return after[0], after
