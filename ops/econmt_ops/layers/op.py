"""Operations over stacks of the cells' layers, with the arguments and rules of `econmt_ops.lstm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from econmt_ops.cells.protocol import Cell
from econmt_ops.cells.table import CELLS
from econmt_ops.core.dropout import Seed
from econmt_ops.core.precision import accumulate_dtype, compute_dtype, explicit_casts
from econmt_ops.core.repeated import Inputs, check_inputs, expanded, values_of
from econmt_ops.core.shapes import Shapes, check_dropout, kind_of
from econmt_ops.core.stack import StackOptions
from econmt_ops.core.weights import State
from econmt_ops.dispatch.select import Candidate, Problem, run
from econmt_ops.dispatch.traits import add_op
from econmt_ops.layers.implementations import implementations_for

_ROUNDED = ("h", "x")
"""Names of states that have the compute type; the others have the accumulate type."""


OPS: dict[str, LayerOp] = {}
"""Operations by the names of their cells; `econmt_ops` makes all of them."""


class LayerOp:
    """Operation that runs a stack of layers of one cell over a batch of sequences.

    Args:
        cells: Cells whose weights it takes; the first whose shapes fit the bottom layer is used.
    """

    def __init__(self, *cells: Cell) -> None:
        cell = cells[0]
        self.cells, self.__name__ = cells, cell.name
        states = f"States of a layer: {', '.join(cell.states)}."
        self.__doc__ = f"{cell.summary}\n\n    {states} `LayerOp.__call__` describes the arguments."
        self._implementations = add_op(cell.name, implementations_for(cells))
        CELLS[cell.name], OPS[cell.name] = cell, self

    def __call__(
        self,
        inputs: Inputs,
        layers: tuple[Any, ...],
        *,
        state: State | None = None,
        lengths: Tensor | None = None,
        reverse: bool = False,
        residual: bool = False,
        dropout: float = 0.0,
        dropout_seed: Seed | None = None,
        variational: bool = False,
        stash: str = "auto",
        implementation: str = "auto",
    ) -> tuple[Tensor, State]:
        """Runs the stack.

        Args:
            inputs: Inputs, (B, T, I), or their distinct rows as `UniqueRows`, which is expanded.
            layers: Weights of each layer, bottom first; upper layers read H values.
            state: Initial states of each layer, bottom first, (B, H) each; None for zeros.
            lengths: Lengths of the rows, (B,) int64, on the CPU or the device; later positions have no influence. None
                if every row has T steps.
            reverse: If True, each row is processed from its own last position to its first.
            residual: If True, each upper layer adds its input to its output.
            dropout: Dropout probability of the inputs of the upper layers, applied before the residual sum.
            dropout_seed: Seed of the dropout masks, required if dropout is not 0; an int, or an int64 scalar tensor on
                the device.
            variational: If True, one mask per row and layer serves all time steps (Gal and Ghahramani 2016).
            stash: Level of what is kept for the backward pass, "auto" or one of `econmt_ops.core.chunks.STASHES`, for
                implementations that have levels.
            implementation: "auto" or the name of an implementation.

        Returns:
            The outputs of the top layer, (B, T, H), zero at and after a row's length, and the states after each row's
            last step, ordered as `state`; a row of length 0 returns its initial states. Values that are summed from
            step to step are float32, or float64 for float64 inputs.

        Raises:
            ValueError: If shapes or types do not fit, the implementation or stash level is unknown, or dropout has no
                seed.
        """
        name = self.__name__
        check = Shapes(name)
        check_inputs(check, inputs)
        layers = _as_layers(name, layers, self.cells)
        cell = _check_layers(check, layers, self.cells)
        if lengths is not None:
            check.lengths(lengths, "T")
        check_dropout(name, dropout, dropout_seed)
        like = values_of(inputs)
        dtype = compute_dtype(like)
        types = [dtype if each in _ROUNDED else accumulate_dtype(dtype) for each in cell.states]
        start = _prepare_state(check, cell, state, len(layers), like, types)
        options = StackOptions(lengths, reverse, residual, dropout, dropout_seed, variational)

        def call(
            candidate: Candidate, inputs: Inputs, layers: tuple[Any, ...], start: State
        ) -> tuple[Tensor, State]:
            cast = layers
            if not candidate.traits.casts:
                cast = tuple(layer._make(part.to(dtype) for part in layer) for layer in layers)
            with explicit_casts(like):
                result: tuple[Tensor, State] = candidate.function(
                    expanded(inputs).to(dtype), cast, start, options, **candidate.options
                )
            return result

        detail = f"layers={len(layers)} {'full' if lengths is None else 'lengths'}"
        problem = Problem(name, (inputs, layers, start), dtype, check.sizes, detail)
        return run(problem, call, self._implementations, implementation, stash=stash)


def _as_layers(op: str, layers: object, cells: tuple[Cell, ...]) -> tuple[Any, ...]:
    kinds = tuple({cell.weights: None for cell in cells})
    names = " or ".join(kind.__name__ for kind in kinds)
    if isinstance(layers, kinds):
        raise ValueError(f"{op}: layers must be a tuple of {names}, one per layer; write (weights,)")  # noqa: TRY004  as all of its errors
    if isinstance(layers, Tensor) or not isinstance(layers, Iterable):
        raise ValueError(f"{op}: layers must be a tuple of {names}, got {kind_of(layers)}")  # noqa: TRY004  as all of its errors
    checked = tuple(layers)
    if not checked:
        raise ValueError(f"{op}: layers is empty, at least one is needed")
    for number, layer in enumerate(checked):
        if not isinstance(layer, kinds):
            raise ValueError(f"{op}: layers[{number}] must be {names}, got {kind_of(layer)}")  # noqa: TRY004  as all of its errors
        if type(layer) is not type(checked[0]):
            raise ValueError(f"{op}: all layers must be {type(checked[0]).__name__}, as layers[0] is")
    return checked


def _check_layers(check: Shapes, layers: tuple[Any, ...], cells: tuple[Cell, ...]) -> Cell:
    """Returns the cell to which the weights belong, and records H.

    Raises:
        ValueError: If the shape of a tensor does not fit the cell.
    """
    inputs = check.sizes["I"]
    for field, tensor in zip(layers[0]._fields, layers[0], strict=True):
        check.is_number(f"layers[0].{field}", tensor)
    fitting = [cell for cell in cells if isinstance(layers[0], cell.weights)]

    def shapes(cell: Cell) -> dict[str, tuple[int, ...]]:
        return cell.parameter_shapes(inputs, cell.hidden_size(layers[0], inputs))

    cell = next(
        (each for each in fitting if shapes(each)["input"] == tuple(layers[0].input.shape)), fitting[0]
    )
    check.sizes["H"] = hidden = cell.hidden_size(layers[0], inputs)
    for number, layer in enumerate(layers):
        wanted = cell.parameter_shapes(inputs if number == 0 else hidden, hidden)
        for field, tensor in zip(layer._fields, layer, strict=True):
            check.exactly(f"layers[{number}].{field}", tensor, wanted[field], ("I", "H"))
    return cell


def _prepare_state(
    check: Shapes, cell: Cell, state: State | None, count: int, like: Tensor, types: list[torch.dtype]
) -> State:
    """Returns the initial state: ``state`` checked and cast, or zeros; a state named x has the size of the input.

    Raises:
        ValueError: If ``state`` is not a tuple of the cell's states for each layer.
    """
    batch = check.sizes["B"]
    widths = [
        {name: check.sizes["I" if name == "x" and number == 0 else "H"] for name in cell.states}
        for number in range(count)
    ]
    if state is None:
        return tuple(
            tuple(
                like.new_zeros(batch, width, dtype=dtype)
                for width, dtype in zip(sizes.values(), types, strict=True)
            )
            for sizes in widths
        )
    names = f"({', '.join(cell.states)}{',' if len(cell.states) == 1 else ''})"
    if not isinstance(state, (tuple, list)) or len(state) != count:
        raise ValueError(f"{check.op}: state must be a tuple of {names}, one for each of {count} layers")
    for number, (parts, sizes) in enumerate(zip(state, widths, strict=True)):
        if not isinstance(parts, (tuple, list)) or len(parts) != len(sizes):
            raise ValueError(f"{check.op}: state[{number}] must be {names}, got {kind_of(parts)}")
        for part, (name, width) in zip(parts, sizes.items(), strict=True):
            check.exactly(f"state[{number}] {name}", part, (batch, width), ("B", "H"))
    return tuple(tuple(part.to(dtype) for part, dtype in zip(parts, types, strict=True)) for parts in state)
