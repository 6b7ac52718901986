"""Interfaces of a recurrent cell: its sizes and the equations of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from econmt_ops.core.shapes import Shapes
from econmt_ops.core.weights import LowRank


class Cell(Protocol):
    """Sizes of a layer of a recurrent cell; the equations are in `StepCell` and `econmt_ops.cells.scan.ScanLayer`.

    B batch, I input size, H hidden size. A layer carries one or more states from step to step, each (B, H).

    Attributes:
        name: Name of the cell and its operation.
        summary: Documentation of the operation: the equations and the weights, without arguments.
        states: Names of the states; the output h is one of them only if the next step reads it.
        weights: NamedTuple of a layer's weights.
        shapes: Shapes of the weights by name, as `Shapes` reads them.
    """

    name: str
    summary: str
    states: tuple[str, ...]
    weights: type[Any]
    shapes: dict[str, str]

    def shapes_of(self, inputs: int, hidden: int) -> dict[str, str]:  # noqa: ARG002 - few depend on the sizes
        """Returns `shapes` for input size I and hidden size H."""
        return self.shapes

    def parameter_shapes(self, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a layer's parameters by name, for input size I and hidden size H."""
        sizes = {"I": inputs, "H": hidden}
        return {
            name: tuple(int(size[:-1] or 1) * sizes[size[-1]] for size in shape.split())
            for name, shape in self.shapes_of(inputs, hidden).items()
        }

    def hidden_size(self, weights: Any, inputs: int) -> int | None:  # noqa: ARG002
        """Returns H of a layer from its unchecked weights and its input size I; None if they do not tell."""
        matrix = weights.hidden.right if isinstance(weights.hidden, LowRank) else weights.hidden
        return matrix.shape[1] if isinstance(matrix, Tensor) and matrix.dim() == 2 else None

    def check(self, check: Shapes, name: str, weights: Any, inputs: str = "I") -> None:
        """Checks the weights of a layer, of which messages speak by ``name``, and records H; raises ValueError.

        ``check`` knows the size of the layer's input, whose name is ``inputs``, as in `Shapes`.
        """
        size = check.sizes[inputs]
        if "H" not in check.sizes and (hidden := self.hidden_size(weights, size)) is not None:
            check.sizes["H"] = hidden
        shapes = self.shapes_of(size, check.sizes.get("H", 0))
        # The recurrent matrix, which tells H, comes first.
        for field in sorted(weights._fields, key=lambda field: field != "hidden"):
            part, shape = getattr(weights, field), shapes[field].replace("I", inputs)
            if isinstance(part, LowRank):
                (rows, columns), rank = shape.split(), f"{name}.{field}.rank"
                check(f"{name}.{field}.right", part.right, f"{rank} {columns}")
                check(f"{name}.{field}.left", part.left, f"{rows} {rank}")
                if part.rank == 0:
                    raise ValueError(f"{check.op}: {name}.{field} must have a rank of at least 1, got 0")
            else:
                check(f"{name}.{field}", part, shape)

    def operations(self, inputs: int, hidden: int) -> int:
        """Returns the floating point operations of the products of one forward step of one row."""
        shapes = self.parameter_shapes(inputs, hidden).values()
        return 2 * sum(math.prod(shape) for shape in shapes if len(shape) == 2)


class Split(NamedTuple):
    """Weights of a layer, separated by the operation that reads them.

    Attributes:
        input: (G H, I). hidden: (G H, H). Tensors; of an LSTM, `LowRank` if they are factorized.
        read_bias, recurrent_bias: (G H,), added to the products; or None.
        extra: Further weights of the pointwise part of a step.
    """

    input: Any
    hidden: Any
    read_bias: Tensor | None
    recurrent_bias: Tensor | None
    extra: tuple[Tensor, ...]


class StepCell(Cell, Protocol):
    """Equations of one step of a cell whose gates read the h of the step before, which is its first state.

    A weight has G H rows with G gates.
    """

    def split(self, weights: Any) -> Split:
        """Separates a layer's weights by the operation that reads them."""

    def forward(
        self, read: Tensor, recurrent: Tensor, state: Sequence[Tensor], extra: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Computes one step.

        Args:
            read: Product with the inputs plus `Split.read_bias`, (B, G H) in the compute type.
            recurrent: Product with the previous h plus `Split.recurrent_bias`, (B, G H).
            state: States before the step, (B, H) each; h in the compute type, the others in the accumulate type.
            extra: Weights `Split.extra`, in any type.

        Returns:
            The states after the step.
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
        """Computes the gradients of :meth:`forward`.

        Args:
            read, recurrent, state, extra: Arguments of the forward step.
            after: States that it returned.
            dafter: Gradients of ``after``, (B, H) each.

        Returns:
            The gradients of ``read`` and ``recurrent``, (B, G H) each; those of ``state``, without the part that flows
            through the recurrent product; and those of ``extra``, summed over the rows, in the accumulate type.
        """
