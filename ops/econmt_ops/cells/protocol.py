"""What the rest of the project may ask of a recurrent cell."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Cell(Protocol):
    """The mathematics of one step of a cell, and the sizes that follow from it.

    B batch, I input size, H hidden size, G the number of gates. Between its steps a cell hands on *states*, each
    (B, H), of which the first is h, what the cell gives to others.

    Attributes:
        name: that of the op.
        gates: G, how many times H rows a weight has.
        states: the names of the states, h first.
    """

    name: str
    gates: int
    states: tuple[str, ...]

    def parameter_shapes(self, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's parameters by name, for input size I and hidden size H."""

    def operations(self, inputs: int, hidden: int) -> int:
        """Floating point operations of the products of one forward step of one row, for I and H."""

    def forward(self, read: Tensor, recurrent: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One step.

        Args:
            read: (B, G H) in the compute type, the share of the inputs and the bias in the gates.
            recurrent: (B, G H), the share of the h before.
            state: (B, H) each; h in the compute type, the others in the accumulate type.

        Returns:
            The state after the step.
        """

    def backward(
        self,
        read: Tensor,
        recurrent: Tensor,
        state: tuple[Tensor, ...],
        after: tuple[Tensor, ...],
        dafter: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Backward of :meth:`forward`.

        Args:
            read, recurrent, state: as there. after: what it returned.
            dafter: the gradients of ``after``, (B, H) each.

        Returns:
            The gradients of ``read`` and ``recurrent``, (B, G H) each, and of ``state`` beside what flows through the
            recurrent product.
        """
