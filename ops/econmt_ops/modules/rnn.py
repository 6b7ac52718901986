"""`torch.nn.Module` versions of `econmt_ops.lstm` and `econmt_ops.gru` that replace those of `torch.nn`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import rnn as torch_rnn

from econmt_ops.cells.gru import GRU as GRU_CELL
from econmt_ops.core.weights import GRUWeights, LSTMWeights, ProjectedLSTMWeights
from econmt_ops.lstm import lstm
from econmt_ops.lstm.call_plans import PLANS, SplitLSTMWeights, key_of_lstm, run_whole
from econmt_ops.lstm.cudnn import in_order, move_together
from econmt_ops.lstm.reference import projected_lstm
from econmt_ops.modules.base import RecurrentModule
from econmt_ops.modules.directions import Prepare
from econmt_ops.modules.resets import States
from econmt_ops.products.stack import StackOptions

_PARTS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
"""Names of a layer's parameters without their suffix."""


class LSTM(RecurrentModule):
    """Stacked LSTM that replaces `torch.nn.LSTM`: same arguments, parameters, results and errors.

    Each class loads the other's state dict, and parameters are initialized alike from the same generator state. The
    equations are those of `econmt_ops.lstm`. With ``proj_size`` the layers are PyTorch's own.

    Args:
        input_size: I, number of input features.
        hidden_size: H, number of features of h and c.
        num_layers: L, number of stacked layers. An upper layer reads the outputs of the layer below, those of both
            directions if bidirectional.
        bias: If False, the layers have no biases.
        batch_first: If True, inputs and outputs are (B, T, .) instead of (T, B, .).
        dropout: Dropout probability of the inputs of the upper layers during training.
        bidirectional: If True, each layer runs in both directions.
        proj_size: If positive, h is projected to this number of features (Sak, Senior and Beaufays 2014).
        device: Device of the parameters.
        dtype: Type of the parameters.
        residual: If True, each upper layer adds its input to its output.
        variational: If True, one dropout mask per row and layer serves all time steps (Gal and Ghahramani 2016).
        implementation: "auto" or the name of an implementation of `econmt_ops.lstm`.
    """

    get_expected_cell_size = torch_rnn.LSTM.get_expected_cell_size
    check_forward_args: Any = torch_rnn.LSTM.check_forward_args
    permute_hidden: Any = torch_rnn.LSTM.permute_hidden

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        residual: bool = False,
        variational: bool = False,
        implementation: str = "auto",
    ) -> None:
        if proj_size and implementation not in ("auto", "reference"):
            raise ValueError(
                f"LSTM: implementation must be auto with proj_size, whose layers are PyTorch's, got {implementation!r}"
            )
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size
        super().__init__("LSTM", (*sizes, device, dtype), residual, variational, implementation)

    def flatten_parameters(self) -> None:
        """Moves float32 parameters on a GPU into one buffer, as `torch.nn.LSTM` does: cuDNN reads it in place."""
        if self.proj_size:
            super().flatten_parameters()
        elif self.bias and not self.bidirectional:
            move_together(in_order([self._weights(layer) for layer in range(self.num_layers)]))

    def layer_weights(self, layer: int, reverse: bool = False) -> LSTMWeights:
        """Returns the weights of one layer in one direction for `econmt_ops.lstm`; the two biases are summed.

        A projection is not among them.
        """
        weights = SplitLSTMWeights(*self._parts(layer, reverse))
        return weights.merged() if self.bias else LSTMWeights(*weights[:3])

    def _run(
        self, inputs: Tensor, state: States | None, options: StackOptions, prepare: Prepare | None = None
    ) -> tuple[Tensor, States]:
        if prepare is None and not self.proj_size and not self.bidirectional and options.dropout < 1.0:
            layers = tuple([self._weights(layer) for layer in range(self.num_layers)])
            first = None if state is None else tuple(zip(*state, strict=True))
            plan = PLANS.get(key_of_lstm(inputs, layers, first, options, self.implementation))
            if plan is not None:
                outputs, (h, c) = run_whole(plan, inputs, layers, state, options)
                return outputs, (h, c.to(h.dtype))
        return super()._run(inputs, state, options, prepare)

    @property
    def op(self) -> Any:
        """Operation that runs the layers."""
        return projected_lstm if self.proj_size else lstm

    def _weights(self, layer: int, reverse: bool = False) -> Any:
        """Returns the weights of one layer in one direction, with both biases if there are any."""
        if self.proj_size:
            projection: Tensor = getattr(self, "weight_hr" + self._suffixes(layer)[int(reverse)])
            return ProjectedLSTMWeights(*self.layer_weights(layer, reverse), projection)
        suffix = self._suffixes(layer)[int(reverse)]
        parts = [self._parameters.get(name + suffix) for name in _PARTS]
        # Only the plans of eager calls profit from two biases. Weights are no parameters if they are computed, as by
        # torch.nn.utils.parametrize.
        if torch.compiler.is_compiling() or any(part is None for part in parts):
            return self.layer_weights(layer, reverse)
        return SplitLSTMWeights(*parts)  # type: ignore[arg-type]


class GRU(RecurrentModule):
    """Stacked GRU that replaces `torch.nn.GRU`: same arguments, parameters, results and errors.

    Args:
        input_size: I, number of input features.
        hidden_size: H, number of features of h.
        num_layers, bias, batch_first, dropout, bidirectional, device, dtype: As of `LSTM`.
        residual, variational: As of `LSTM`.
        implementation: "auto" or the name of an implementation of `econmt_ops.gru`.
        proj_size: Refused, as by `torch.nn.GRU`.
    """

    cell = GRU_CELL

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        residual: bool = False,
        variational: bool = False,
        implementation: str = "auto",
        proj_size: int | None = None,
    ) -> None:
        if proj_size is not None:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0
        super().__init__("GRU", (*sizes, device, dtype), residual, variational, implementation)

    def flatten_parameters(self) -> None:
        """Does nothing: the layers read the parameters where they are."""

    def layer_weights(self, layer: int, reverse: bool = False) -> GRUWeights:
        """Returns the weights of one layer in one direction for `econmt_ops.gru`."""
        return GRUWeights(*self._parts(layer, reverse))
