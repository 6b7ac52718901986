"""`torch.nn.Module` versions of the layers of cells that `torch.nn` does not have."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from econmt_ops.cells.lnlstm import LNLSTM
from econmt_ops.cells.scan import GILR_LSTM, QRNN_OF_TWO
from econmt_ops.cells.scan import SRU as SRU_CELL
from econmt_ops.cells.scan import SSRU as SSRU_CELL
from econmt_ops.core.shapes import Shapes
from econmt_ops.core.weights import State
from econmt_ops.modules.directions import StackedLayers
from econmt_ops.products.dropout import seed_of
from econmt_ops.products.stack import StackOptions


class CellLayers(StackedLayers, nn.Module):
    """Base class of stacked layers of one cell, in one direction or both; batch-first.

    Parameters have the field names of the cell's weights with the suffix ``_l0``, ``_l0_reverse`` and so on. Gains of a
    normalization are initialized to 1, all other parameters from U(-1 / sqrt(hidden_size), 1 / sqrt(hidden_size)).

    Args:
        input_size: I, number of input features.
        hidden_size: H, number of features of outputs and states.
        num_layers, dropout, bidirectional, residual, variational, device, dtype: As of `econmt_ops.LSTM`.
        implementation: "auto" or the name of an implementation of the op.

    Raises:
        ValueError: If ``input_size``, ``hidden_size`` or ``num_layers`` is less than 1, or ``dropout`` not from 0 to 1.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        dropout: float = 0.0,
        bidirectional: bool = False,
        residual: bool = False,
        variational: bool = False,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        for key in ("input_size", "hidden_size", "num_layers"):
            if (size := getattr(self, key)) < 1:
                raise ValueError(f"{type(self).__name__}: {key} must be at least 1, got {size}")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"{type(self).__name__}: dropout must be from 0 to 1, got {dropout}")
        self.dropout, self.bidirectional, self.residual = dropout, bidirectional, residual
        self.variational, self.implementation = variational, implementation
        for layer in range(num_layers):
            suffixes = self._suffixes(layer)
            for suffix in suffixes:
                width = input_size if layer == 0 else len(suffixes) * hidden_size
                for name, shape in self.cell.parameter_shapes(width, hidden_size).items():
                    weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(name + suffix, weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all parameters again."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for name, weight in self.named_parameters():
            if "_gain_" in name:
                nn.init.ones_(weight)
            else:
                nn.init.uniform_(weight, -bound, bound)

    def layer_weights(self, layer: int, reverse: bool = False) -> Any:
        """Returns the weights of one layer in one direction in the form that the op takes."""
        suffix = self._suffixes(layer)[int(reverse)]
        return self.cell.weights(*(getattr(self, field + suffix) for field in self.cell.weights._fields))

    def forward(
        self,
        inputs: Tensor,
        state: State | None = None,
        *,
        lengths: Tensor | None = None,
        dropout_seed: int | None = None,
    ) -> tuple[Tensor, State]:
        """Runs the layers over a batch of sequences.

        Args:
            inputs: Inputs, (B, T, I).
            state: Initial states, a tuple per layer, (B, H) each, the two directions of a layer one after the other;
                None for zeros.
            lengths: Lengths of the rows, (B,) int64; None if every row has T steps.
            dropout_seed: Seed of the dropout masks; None to draw one from torch's global generator.

        Returns:
            Outputs (B, T, D H) with D directions, zero at and after a row's length, and the states after each row's
            last step, ordered as `state`.

        Raises:
            ValueError: If shapes or types do not fit.
        """
        Shapes(type(self).__name__, input_size=self.input_size)("inputs", inputs, "B T input_size")
        probability, seed = seed_of(self, self.dropout, dropout_seed, inputs.device)
        options = StackOptions(lengths, False, self.residual, probability, seed, self.variational)
        return self._run_layers(inputs, state, options)

    def extra_repr(self) -> str:
        """Returns the sizes, and the settings that differ from the defaults."""
        changed = self._changed("dropout", "bidirectional", "residual", "variational")
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}{changed}"


class LayerNormLSTM(CellLayers):
    """Stacked LSTM with layer normalization of the products; see `econmt_ops.lnlstm`."""

    cell = LNLSTM


class SRU(CellLayers):
    """Stacked simple recurrent units; see `econmt_ops.sru`."""

    cell = SRU_CELL

    def _run_layers(self, inputs: Tensor, state: State | None, *options: Any) -> tuple[Tensor, State]:
        if state is None and 4 * self.hidden_size == 3 * self.input_size:
            # The weights fit another size, too, but a state does not.
            zeros = inputs.new_zeros(inputs.shape[0], self.hidden_size)
            state = ((zeros,),) * (self.num_layers * (1 + self.bidirectional))
        return super()._run_layers(inputs, state, *options)


class SSRU(CellLayers):
    """Stacked simpler simple recurrent units; see `econmt_ops.ssru`."""

    cell = SSRU_CELL


class QRNN(CellLayers):
    """Stacked quasi-recurrent layers with a window of two steps; see `econmt_ops.qrnn`."""

    cell = QRNN_OF_TWO


class GILRLSTM(CellLayers):
    """Stacked LSTM layers whose gates read a linear surrogate of h; see `econmt_ops.gilr_lstm`."""

    cell = GILR_LSTM
