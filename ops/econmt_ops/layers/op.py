"""Operations over stacks of the cells' layers, with the arguments and rules of `econmt_ops.lstm`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from econmt_ops.cells.gru import GRU
from econmt_ops.cells.protocol import Cell
from econmt_ops.cells.scan import ScanLayer
from econmt_ops.cells.table import KINDS
from econmt_ops.core.precision import compute_dtype
from econmt_ops.core.shapes import Shapes
from econmt_ops.core.stack_checks import as_layers
from econmt_ops.core.weights import State, tensors_of
from econmt_ops.dispatch.rule import MODE
from econmt_ops.dispatch.traits import Traits, implementations
from econmt_ops.layers import scanned, stepped
from econmt_ops.lstm import run_layers
from econmt_ops.lstm.reference import is_light
from econmt_ops.lstm.triton import gru_products
from econmt_ops.products.dropout import Seed
from econmt_ops.products.repeated import Inputs, check_inputs, expanded, values_of
from econmt_ops.products.stack import StackOptions, run_cells

OPS: dict[str, LayerOp] = {}
"""Operations by the names of their cells; `econmt_ops` makes all of them."""

_MANY_UNITS = 1536
"""Units from which cuDNN's GRU is faster than single steps in a CUDA graph, too. On an H200, 375 steps of 32 rows in
bfloat16, both passes: 7.90 and 9.51 ms; with TF32 of 1,500 steps of 1,024 units 64.7 and 50.9 ms."""

_SMALL = 128
"""Units up to which it is faster with TF32 than a launch of all steps: 0.366 and 0.663 ms of 100 steps of 64 rows."""

_MANY_ROWS = 256
"""Rows from which it is not: 0.317 and 0.273 ms of 25 steps."""

_FEW_STEPS = 32
"""Steps below which it is faster than that launch outside of a CUDA graph, as for few units, because the host has less
to do: of 25 steps of 64 rows of 512 units in bfloat16 both take about 2.5 ms, of 100 steps 5 and 2.5."""


class LayerOp:
    """Operation that runs a stack of layers of one cell over a batch of sequences.

    Args:
        cells: Cells whose weights it takes; the first whose shapes fit the bottom layer is used.
        others: Names of the cells but the first.
    """

    def __init__(self, *cells: Cell, others: tuple[str, ...] = ()) -> None:
        cell = cells[0]
        KINDS.update(zip((cell.name, *others), cells, strict=True))
        self.cells, self.__name__ = cells, cell.name
        states = f"States of a layer: {', '.join(cell.states)}."
        self.__doc__ = f"{cell.summary}\n\n    {states} `LayerOp.__call__` describes the arguments."
        # Linear recurrences run as the last of the cells (the widest window), which serves the others; step-by-step
        # cells as the first, which knows the kind of weights.
        is_scan = isinstance(cell, ScanLayer)
        module, runs_as = (scanned, cells[-1]) if is_scan else (stepped, cell)
        ways: dict[str, tuple[Callable[..., Any], Traits]] = module.IMPLEMENTATIONS
        stacks = {
            name: (functools.partial(run_cells, functools.partial(way, runs_as)), traits)
            for name, (way, traits) in ways.items()
        }
        implementations(cell.name, **stacks)
        OPS[cell.name] = self

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
            lengths, reverse, residual, dropout, dropout_seed, variational: As of `econmt_ops.lstm`.
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
        check = Shapes(self.__name__)
        check_inputs(check, inputs)
        layers = as_layers(self.__name__, layers, list({cell.weights: None for cell in self.cells}))
        cell = _check_layers(check, layers, self.cells, state)
        like, sizes = values_of(inputs), check.sizes
        options = StackOptions(lengths, reverse, residual, dropout, dropout_seed, variational)
        size = sizes["B"], sizes["T"], sizes["H"]
        light = cell is GRU and _is_light(*size, compute_dtype(like), like.device)
        return run_layers(check, expanded(inputs), layers, cell, state, options, light, stash, implementation)


def _is_light(batch: int, steps: int, hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if torch.gru is faster; of other cells there is none.

    It takes 1.3 to 2.5 times less at all sizes measured on the CPU. On a GPU, where it is cuDNN's, it takes three to
    four times less than single steps that no graph launches; and 0.036 instead of 0.046 ms for both passes of one step
    (32 rows of 512 units in bfloat16) in a graph.
    """
    if device.type != "cuda":
        return is_light(batch, steps, hidden, dtype, device)
    if gru_products(batch, steps, hidden, dtype, device) is None:
        return hidden >= _MANY_UNITS or not MODE.captured or (steps == 1 and torch.is_grad_enabled())
    if not MODE.captured:
        return hidden <= _SMALL or steps < _FEW_STEPS
    return hidden <= _SMALL and batch < _MANY_ROWS and dtype == torch.float32


def _check_layers(check: Shapes, layers: tuple[Any, ...], cells: tuple[Cell, ...], state: Any) -> Cell:
    """Returns the cell to which the weights belong, and records H; raises ValueError if a shape does not fit."""
    first, inputs = layers[0], check.sizes["I"]
    fitting = [cell for cell in cells if isinstance(first, cell.weights)]

    def fits(cell: Cell, hidden: int | None = None) -> bool:
        shapes = cell.parameter_shapes(inputs, hidden or cell.hidden_size(first, inputs) or 0)
        return shapes["input"] == getattr(first.input, "shape", None)

    cell = next(filter(fits, fitting), fitting[0])
    # Weights of an SRU fit two sizes where 4 H = 3 I; a layer above, or a state, tells which.
    told = [part.shape[-1] for part in tensors_of((layers[1:], state)) if part.dim()]
    if told and fits(cell, told[0]):
        check.sizes["H"] = told[0]
    for number, layer in enumerate(layers):
        cell.check(check, f"layers[{number}]", layer, "H" if number else "I")
    return cell
