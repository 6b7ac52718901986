"""One step of a layer of any cell except the LSTM, in searches.

Shapes: R rows, I input size, H hidden size, P output width of the product with the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from econmt.model.inference.layout import Gates
from econmt_ops.cells.protocol import Cell, StepCell
from econmt_ops.cells.scan import ScanCell, ScanLayer, SurrogateLayer, WindowLayer

MakeProduct = Callable[[Tensor, Tensor | None], Gates]
"""Function from a matrix (N, K) and a bias (N,) or None to their product."""

States = tuple[Tensor, ...]


class LayerStep(Protocol):
    """Interface of one step of a layer.

    Attributes:
        read: product with the inputs (R, I), which gives their share (R, P) of the layer's pre-activations.
        width: P.
    """

    read: Gates
    width: int

    def __call__(self, share: Tensor, read: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, States]:
        """Computes the layer's output (R, H), in the type of products, and its states after the step.

        ``share`` (R, P) is the result of :attr:`read` for the inputs ``read`` (R, I).
        """


def layer_step(
    cell: Cell, weights: Any, product: MakeProduct, extra: Callable[[Tensor], Tensor]
) -> LayerStep:
    """Creates the step of a layer; ``extra`` converts weights that multiply single values."""
    if isinstance(cell, SurrogateLayer):
        return _SurrogateStep(cell, weights, product)
    if isinstance(cell, WindowLayer):
        return _WindowStep(cell.cell, weights, product)
    if isinstance(cell, ScanLayer):
        return _ScanStep(cell.cell, weights, product)
    return _RecurrentStep(cell, weights, product, extra)  # type: ignore[arg-type]  # the cells are of these kinds


def _advance(cell: ScanCell, products: Tensor, read: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Computes h and c of a step of a linear recurrence, in the type of c."""
    parts, decay, inputs = cell.start(products.to(before.dtype), before.shape[1])
    c = torch.addcmul(inputs, decay, before)
    return cell.finish(parts, c, read), c


class _ScanStep:
    def __init__(self, cell: ScanCell, weights: Any, product: MakeProduct) -> None:
        self.cell = cell
        self.read, self.width = product(weights.input, weights.bias), len(weights.bias)

    def __call__(self, share: Tensor, read: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, States]:
        h, c = _advance(self.cell, share, read, state[0])
        return h.to(share.dtype), (c,)


class _WindowStep:
    def __init__(self, cell: ScanCell, weights: Any, product: MakeProduct) -> None:
        self.cell = cell
        now, before = weights.input.chunk(2, dim=1)
        self.read, self.width = product(now, weights.bias), len(weights.bias)
        self.before = product(before, None)

    def __call__(self, share: Tensor, read: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, States]:
        c, before = state
        products = self.before(before.to(share.dtype), start=share)
        h, c = _advance(self.cell, products, read, c)
        return h.to(share.dtype), (c, read)


class _SurrogateStep:
    def __init__(self, layer: SurrogateLayer, weights: Any, product: MakeProduct) -> None:
        self.layer = layer
        matrix = torch.cat([weights.surrogate, weights.input])
        bias = torch.cat([weights.surrogate_bias, weights.bias])
        self.read, self.width = product(matrix, bias), len(bias)
        self.below = len(weights.surrogate_bias)
        self.recur = product(weights.hidden, None)

    def __call__(self, share: Tensor, read: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, States]:
        before, c = state
        _, s = _advance(self.layer.surrogate, share[:, : self.below], read, before)
        products = self.recur(before.to(share.dtype), start=share[:, self.below :].contiguous())
        h, c = _advance(self.layer.cell, products, read, c)
        return h.to(share.dtype), (s, c)


class _RecurrentStep:
    def __init__(
        self, cell: StepCell, weights: Any, product: MakeProduct, extra: Callable[[Tensor], Tensor]
    ) -> None:
        self.cell = cell
        parts = cell.split(weights)
        self.read, self.width = product(parts.input, parts.read_bias), len(parts.input)
        self.recur = product(parts.hidden, parts.recurrent_bias)
        self.extra = [extra(part) for part in parts.extra]

    def __call__(
        self,
        share: Tensor,
        read: Tensor,  # noqa: ARG002  only its share is needed
        state: Sequence[Tensor],
    ) -> tuple[Tensor, States]:
        after = self.cell.forward(share, self.recur(state[0].to(share.dtype)), state, self.extra)
        return after[0], after
