"""`torch.nn.Module` versions of the cells' layers; `GRU` has the parameter names of `torch.nn.GRU`."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from econmt_ops.cells.gru import GRU as GRU_CELL
from econmt_ops.cells.lnlstm import LNLSTM
from econmt_ops.cells.scan import GILR_LSTM, QRNN_OF_TWO
from econmt_ops.cells.scan import SRU as SRU_CELL
from econmt_ops.cells.scan import SSRU as SSRU_CELL
from econmt_ops.core.stack import StackOptions, run_stack
from econmt_ops.core.weights import State
from econmt_ops.layers.op import OPS


def seed_of(module: nn.Module, dropout: float, seed: int | None) -> tuple[float, int | None]:
    """Returns the dropout probability that applies now, and its seed, drawn from torch's generator if it is None."""
    if not module.training or dropout == 0.0:
        return 0.0, None
    return dropout, int(torch.randint(1 << 62, ())) if seed is None else seed


class CellLayers(nn.Module):
    """Base class of stacked layers of one cell, in one direction or both; batch-first.

    Parameters have the field names of the cell's weights with the suffix ``_l0``, ``_l0_reverse`` and so on. Gains of a
    normalization are initialized to 1, all other parameters from U(-1 / sqrt(hidden_size), 1 / sqrt(hidden_size)).

    Args:
        input_size: I, number of input features.
        hidden_size: H, number of features of outputs and states.
        num_layers: L, number of stacked layers. An upper layer reads the outputs of the layer below, those of both
            directions if bidirectional.
        dropout: Dropout probability of the inputs of the upper layers during training.
        bidirectional: If True, each layer runs in both directions.
        residual: If True, each upper layer adds its input to its output.
        variational: If True, one dropout mask per row and layer serves all time steps (Gal and Ghahramani 2016).
        implementation: "auto" or the name of an implementation of the op.
        device: Device of the parameters.
        dtype: Type of the parameters.
    """

    cell: ClassVar[Any]
    names: ClassVar[dict[str, str]] = {}
    """Parameter names that differ from the field names."""

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
        self.dropout, self.bidirectional, self.residual = dropout, bidirectional, residual
        self.variational, self.implementation = variational, implementation
        for layer in range(num_layers):
            suffixes = self._suffixes(layer)
            for suffix in suffixes:
                width = input_size if layer == 0 else len(suffixes) * hidden_size
                for name, shape in self._parameter_shapes(width).items():
                    weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(name + suffix, weight)
        self.reset_parameters()

    @property
    def op(self) -> Any:
        """Operation that runs the layers."""
        return OPS[self.cell.name]

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parameters of a layer that reads ``width`` features, by name without suffix."""
        shapes = self.cell.parameter_shapes(width, self.hidden_size)
        return {self.names.get(field, field): shape for field, shape in shapes.items()}

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
        fields = self.cell.weights._fields
        return self.cell.weights(*(getattr(self, self.names.get(field, field) + suffix) for field in fields))

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
        """
        return self._run(inputs, state, self._options(lengths, dropout_seed))

    def _options(self, lengths: Tensor | None, seed: int | None) -> StackOptions:
        """Returns the options of a call, with a new dropout seed if ``seed`` is None and one is needed."""
        probability, seed = seed_of(self, self.dropout, seed)
        return StackOptions(lengths, False, self.residual, probability, seed, self.variational)

    def _weights(self, layer: int, reverse: bool = False) -> Any:
        """Returns the weights with which the module itself calls the op."""
        return self.layer_weights(layer, reverse)

    def _run(self, inputs: Tensor, state: State | None, options: StackOptions) -> tuple[Tensor, State]:
        """Runs the layers; the states of a layer's two directions follow each other."""
        if not self.bidirectional:
            return self.op(  # type: ignore[no-any-return]
                inputs,
                tuple(self._weights(layer) for layer in range(self.num_layers)),
                state=state,
                lengths=options.lengths,
                residual=options.residual,
                dropout=options.dropout,
                dropout_seed=options.seed,
                variational=options.variational,
                implementation=self.implementation,
            )

        def run(layer: int, read: Tensor) -> tuple[Tensor, State]:
            first = None if state is None else state[2 * layer : 2 * layer + 2]
            return self._run_both_ways(layer, read, first, options.lengths)

        outputs, last = run_stack(run, inputs, self.num_layers, options)
        return outputs, tuple(itertools.chain.from_iterable(last))

    def _run_both_ways(
        self, layer: int, read: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        """Runs one layer in both directions; returns outputs (B, T, 2H) and the states of both."""
        halves: list[Tensor] = []
        last: list[tuple[Tensor, ...]] = []
        for reverse in (False, True):
            half, after = self.op(
                read,
                (self._weights(layer, reverse),),
                state=None if state is None else (state[reverse],),
                lengths=lengths,
                reverse=reverse,
                implementation=self.implementation,
            )
            halves.append(half)
            last += after
        return torch.cat(halves, 2), tuple(last)

    def extra_repr(self) -> str:
        """Returns the sizes, and the settings that differ from the defaults."""
        text = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"
        defaults = {
            "bias": True,
            "dropout": 0.0,
            "bidirectional": False,
            "residual": False,
            "variational": False,
        }
        for name, default in defaults.items():
            if getattr(self, name, default) != default:
                text += f", {name}={getattr(self, name)}"
        return text

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse") if self.bidirectional else (f"_l{layer}",)


class GRU(CellLayers):
    """Stacked GRU with the parameters of a batch-first `torch.nn.GRU`; each class loads the other's state dict."""

    cell = GRU_CELL
    names: ClassVar[dict[str, str]] = {
        "input": "weight_ih",
        "hidden": "weight_hh",
        "bias": "bias_ih",
        "hidden_bias": "bias_hh",
    }


class LayerNormLSTM(CellLayers):
    """Stacked LSTM with layer normalization of the products; see `econmt_ops.lnlstm`."""

    cell = LNLSTM


class SRU(CellLayers):
    """Stacked simple recurrent units; see `econmt_ops.sru`."""

    cell = SRU_CELL


class SSRU(CellLayers):
    """Stacked simpler simple recurrent units; see `econmt_ops.ssru`."""

    cell = SSRU_CELL


class QRNN(CellLayers):
    """Stacked quasi-recurrent layers with a window of two steps; see `econmt_ops.qrnn`."""

    cell = QRNN_OF_TWO


class GILRLSTM(CellLayers):
    """Stacked LSTM layers whose gates read a linear surrogate of h; see `econmt_ops.gilr_lstm`."""

    cell = GILR_LSTM
