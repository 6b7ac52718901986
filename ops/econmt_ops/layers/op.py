"""Makes the op of a cell: one function with the arguments and rules of `econmt_ops.lstm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from econmt_ops.cells.protocol import Cell
from econmt_ops.core.dropout import Seed
from econmt_ops.core.precision import accumulate_dtype, compute_dtype, explicit_casts
from econmt_ops.core.repeated import Inputs, check_inputs, expanded, values_of
from econmt_ops.core.shapes import Shapes, check_dropout, kind_of
from econmt_ops.core.weights import State
from econmt_ops.dispatch.select import Candidate, Problem, implementations, run


class LayerOp(Protocol):
    """A stack of layers of one cell over a batch of sequences."""

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
        """See `_DOCUMENT`."""


_DOCUMENT = """{summary}

    Args:
        inputs: (B, T, I); or `UniqueRows`, rows of which many positions read the same, which is written out.
        layers: the weights, bottom first; the upper layers read H values.
        state: of every layer, bottom first, its states {states}; zeros if None.
        lengths: (B,) int64, on the CPU or the device: what lies at or past a row's length has no influence;
            None: all rows are T long.
        reverse: walk each row from its own last position to its first.
        residual: the output of each layer but the bottom one is its own plus what the layer has read.
        dropout: the probability with which values of what the upper layers read are dropped, before the
            residual sum is taken.
        dropout_seed: the seed of the dropout masks, required when dropout is not 0; an int, or an int64 scalar
            tensor on the device.
        variational: one mask a row and layer for all time steps (Gal and Ghahramani 2016).
        stash: what implementations that can choose keep for the backward pass, one of
            `econmt_ops.core.chunks.STASHES` or "auto".
        implementation: "auto" or the name of one.

    Returns:
        The outputs of the top layer, (B, T, H), zero at or past a row's length; and the states after each row's last
        step, as `state`; those of a row of length 0 are as they were. What is added up from step to step is float32,
        or float64 for float64 inputs.

    Raises:
        ValueError: shapes or types do not fit, the implementation or stash level is unknown, or dropout has no seed.
    """


def layer_op(package: str, summary: str, *cells: Cell, rounded: tuple[str, ...] = ("h", "x")) -> LayerOp:
    """The op of a cell.

    Args:
        package: which holds its implementations, named as the cell.
        summary: the first lines of its documentation, which have its equations.
        cells: of which it takes weights; the first whose shapes fit the bottom layer is meant.
        rounded: names of states that have the compute type; the others have the accumulate type.
    """
    name = cells[0].name
    available = implementations(package, name)

    def op(
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
        check = Shapes(name)
        check_inputs(check, inputs)
        layers = _as_layers(name, layers, cells)
        cell = _check_layers(check, layers, cells)
        if lengths is not None:
            check.lengths(lengths, "T")
        check_dropout(name, dropout, dropout_seed)
        like = values_of(inputs)
        dtype = compute_dtype(like)
        types = [dtype if each in rounded else accumulate_dtype(dtype) for each in cell.states]
        start = _prepare_state(check, cell, state, len(layers), like, types)

        def call(
            candidate: Candidate, inputs: Inputs, layers: tuple[Any, ...], start: State
        ) -> tuple[Tensor, State]:
            given = layers
            if not candidate.traits.casts:
                given = tuple(layer._make(part.to(dtype) for part in layer) for layer in layers)
            with explicit_casts(like):
                result: tuple[Tensor, State] = candidate.function(
                    expanded(inputs).to(dtype),
                    given,
                    state=start,
                    lengths=lengths,
                    reverse=reverse,
                    residual=residual,
                    dropout=dropout,
                    dropout_seed=dropout_seed,
                    variational=variational,
                    **candidate.options,
                )
            return result

        detail = f"layers={len(layers)} {'full' if lengths is None else 'lengths'}"
        problem = Problem(name, (inputs, layers, start), dtype, check.sizes, detail)
        return run(problem, call, available, implementation, stash=stash)

    op.__name__ = op.__qualname__ = name
    op.__module__ = package
    op.__doc__ = _DOCUMENT.format(summary=summary, states=", ".join(cells[0].states))
    return op


def _as_layers(op: str, layers: object, cells: tuple[Cell, ...]) -> tuple[Any, ...]:
    kinds = tuple({cell.weights: None for cell in cells})
    names = " or ".join(kind.__name__ for kind in kinds)
    if isinstance(layers, kinds):
        raise ValueError(f"{op}: layers must be a tuple of {names}, one a layer; write (weights,)")  # noqa: TRY004  as all of its errors
    if isinstance(layers, Tensor) or not isinstance(layers, Iterable):
        raise ValueError(f"{op}: layers must be a tuple of {names}, got {kind_of(layers)}")  # noqa: TRY004  as all of its errors
    found = tuple(layers)
    if not found:
        raise ValueError(f"{op}: layers is empty, at least one is needed")
    for number, layer in enumerate(found):
        if not isinstance(layer, kinds):
            raise ValueError(f"{op}: layers[{number}] must be {names}, got {kind_of(layer)}")  # noqa: TRY004  as all of its errors
        if type(layer) is not type(found[0]):
            raise ValueError(f"{op}: all layers must be {type(found[0]).__name__}, as layers[0] is")
    return found


def _check_layers(check: Shapes, layers: tuple[Any, ...], cells: tuple[Cell, ...]) -> Cell:
    """The cell that the weights are of; learns H.

    Raises:
        ValueError: a tensor has another shape than the cell's.
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
    """The state a stack starts from: ``state`` checked and cast, or zeros; that named x is as wide as the input.

    Raises:
        ValueError: it is not one tuple of the cell's states a layer.
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
