"""What the rest of the project may ask of a recurrent cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Cell(Protocol):
    """The sizes of a layer of a cell; what it computes is in `StepCell` and `econmt_ops.cells.scan.ScanLayer`.

    B batch, I input size, H hidden size. From step to step a layer hands on *states*, each (B, H).

    Attributes:
        name: that of the op.
        states: their names; h, what the cell gives to others, is among them only if the next step reads it.
        weights: the NamedTuple of a layer's tensors.
    """

    name: str
    states: tuple[str, ...]
    weights: type[Any]

    def parameter_shapes(self, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's parameters by name, for input size I and hidden size H."""

    def hidden_size(self, weights: Any, inputs: int) -> int:
        """H of a layer with weights that nobody has checked, for input size I."""

    def operations(self, inputs: int, hidden: int) -> int:
        """Floating point operations of the products of one forward step of one row, for I and H."""


class Split(NamedTuple):
    """The weights of a layer by what reads them.

    Attributes:
        input: (G H, I). hidden: (G H, H).
        read_bias, recurrent_bias: (G H,), added to the products; or None.
        extra: what the pointwise part of a step reads.
    """

    input: Tensor
    hidden: Tensor
    read_bias: Tensor | None
    recurrent_bias: Tensor | None
    extra: tuple[Tensor, ...]


class StepCell(Cell, Protocol):
    """The mathematics of one step of a cell whose gates read h of the step before, the first of its states.

    G is the number of gates.

    Attributes:
        gates: G, how many times H rows a weight has.
    """

    gates: int

    def split(self, weights: Any) -> Split:
        """The parts of a layer's weights."""

    def forward(
        self, read: Tensor, recurrent: Tensor, state: Sequence[Tensor], extra: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """One step.

        Args:
            read: (B, G H) in the compute type, the product with the inputs, with `Split.read_bias`.
            recurrent: (B, G H), the product with the h before, with `Split.recurrent_bias`.
            state: (B, H) each; h in the compute type, the others in the accumulate type.
            extra: see `Split`, in any type.

        Returns:
            The state after the step.
        """

    def backward(
        self,
        read: Tensor,
        recurrent: Tensor,
        state: Sequence[Tensor],
        after: Sequence[Tensor],
        dafter: Sequence[Tensor],
        extra: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Backward of :meth:`forward`.

        Args:
            read, recurrent, state, extra: as there. after: what it returned.
            dafter: the gradients of ``after``, (B, H) each.

        Returns:
            The gradients of ``read`` and ``recurrent``, (B, G H) each; of ``state`` beside what flows through the
            recurrent product; and of ``extra``, summed over the rows, in the accumulate type.
        """
