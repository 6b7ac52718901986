"""The cells' layers as modules that own their weights; those of `torch.nn.GRU` have its names."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from econmt_ops.cells.gru import GRU as GRU_CELL
from econmt_ops.cells.lnlstm import LNLSTM
from econmt_ops.cells.protocol import Cell
from econmt_ops.cells.scan import GILR_LSTM, QRNN_OF_TWO
from econmt_ops.cells.scan import SRU as SRU_CELL
from econmt_ops.cells.scan import SSRU as SSRU_CELL
from econmt_ops.core.dropout import dropout as drop_units
from econmt_ops.core.weights import State
from econmt_ops.gilr_lstm import gilr_lstm
from econmt_ops.gru import gru
from econmt_ops.layers.op import LayerOp
from econmt_ops.lnlstm import lnlstm
from econmt_ops.qrnn import qrnn
from econmt_ops.sru import sru
from econmt_ops.ssru import ssru


class CellLayers(nn.Module):
    """Layers of one cell, in one direction or in both; batch-first.

    Parameters are named as the fields of the cell's weights, with `_l0`, `_l0_reverse` and so on behind them.
    """

    op: ClassVar[Any]
    cell: ClassVar[Any]
    names: ClassVar[dict[str, str]] = {}
    """Names of parameters that are not those of the fields."""

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
        """Makes the weights, uniform in ±1 / sqrt(hidden_size), gains of a normalisation 1.

        Args:
            input_size: I.
            hidden_size: H.
            num_layers: L; the upper layers read the outputs of the layer below, of both directions if
                bidirectional.
            dropout: on what the upper layers read, while training.
            bidirectional: whether each layer walks in both directions.
            residual: add to the output of each upper layer what it has read.
            variational: one dropout mask a row and layer for all time steps.
            implementation: of the op.
            device: of the weights.
            dtype: of the weights.
        """
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.dropout, self.bidirectional, self.residual = dropout, bidirectional, residual
        self.variational, self.implementation = variational, implementation
        cell: Cell = self.cell
        for layer in range(num_layers):
            width = input_size if layer == 0 else len(self._suffixes(layer)) * hidden_size
            for suffix in self._suffixes(layer):
                for field, shape in cell.parameter_shapes(width, hidden_size).items():
                    weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(self.names.get(field, field) + suffix, weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for name, weight in self.named_parameters():
            if "_gain_" in name:
                nn.init.ones_(weight)
            else:
                nn.init.uniform_(weight, -bound, bound)

    def layer_weights(self, layer: int, reverse: bool = False) -> Any:
        """The weights of one layer in one direction, as the op takes them."""
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
        """Runs the layers.

        Args:
            inputs: (B, T, I).
            state: a tuple of the cell's states for each layer, of both directions one after the other; zeros if
                None.
            lengths: (B,) int64; None: all rows are T long.
            dropout_seed: of the masks; drawn from torch's global generator if None.

        Returns:
            outputs (B, T, D H) with D directions, zero at or past a row's length, and the states after each row's last
            step, as `state`.
        """
        probability = self.dropout if self.training else 0.0
        seed = dropout_seed
        if probability > 0.0 and seed is None:
            seed = int(torch.randint(1 << 62, ()))
        op: LayerOp = type(self).op
        if not self.bidirectional:
            return op(
                inputs,
                tuple(self.layer_weights(layer) for layer in range(self.num_layers)),
                state=state,
                lengths=lengths,
                residual=self.residual,
                dropout=probability,
                dropout_seed=seed,
                variational=self.variational,
                implementation=self.implementation,
            )
        outputs = inputs
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            read = outputs
            if layer > 0 and probability > 0.0:
                assert seed is not None
                read = drop_units(read, probability, seed, self.variational, layer)
            halves = []
            for way in (0, 1):
                half, after = op(
                    read,
                    (self.layer_weights(layer, bool(way)),),
                    state=None if state is None else (state[2 * layer + way],),
                    lengths=lengths,
                    reverse=bool(way),
                    implementation=self.implementation,
                )
                halves.append(half)
                last += after
            outputs = torch.cat(halves, 2)
            if self.residual and layer > 0:
                outputs = outputs + read
        return outputs, tuple(last)

    def extra_repr(self) -> str:
        """Returns the sizes."""
        ways = ", bidirectional=True" if self.bidirectional else ""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}{ways}"

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse") if self.bidirectional else (f"_l{layer}",)


class GRU(CellLayers):
    """GRU layers with the parameters of a batch-first `torch.nn.GRU`: either loads the other's state dict."""

    op, cell = gru, GRU_CELL
    names: ClassVar[dict[str, str]] = {
        "input": "weight_ih",
        "hidden": "weight_hh",
        "bias": "bias_ih",
        "hidden_bias": "bias_hh",
    }


class LayerNormLSTM(CellLayers):
    """LSTM layers whose products are normalised; see `econmt_ops.lnlstm`."""

    op, cell = lnlstm, LNLSTM


class SRU(CellLayers):
    """See `econmt_ops.sru`."""

    op, cell = sru, SRU_CELL


class SSRU(CellLayers):
    """See `econmt_ops.ssru`."""

    op, cell = ssru, SSRU_CELL


class QRNN(CellLayers):
    """QRNN layers with a window of two steps; see `econmt_ops.qrnn`."""

    op, cell = qrnn, QRNN_OF_TWO


class GILRLSTM(CellLayers):
    """See `econmt_ops.gilr_lstm`."""

    op, cell = gilr_lstm, GILR_LSTM
