"""`torch.nn.Module` versions of the ops, with the parameter names of `torch.nn` where a counterpart exists."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt_ops.additive_attention import additive_attention
from econmt_ops.attentional_lstm import attentional_lstm
from econmt_ops.cells.lstm import LSTM as LSTM_CELL
from econmt_ops.core.weights import AttentionalLSTMState, AttentionalLSTMWeights, LSTMWeights, State
from econmt_ops.layers.modules import CellLayers, seed_of
from econmt_ops.linear_cross_entropy import linear_cross_entropy
from econmt_ops.lstm import bidirectional_lstm, lstm
from econmt_ops.lstm.call_plans import SplitLSTMWeights, run_again, split_weights
from econmt_ops.lstm.cudnn import in_order, move_together


class LSTM(CellLayers):
    """Stacked LSTM: a batch-first replacement for `torch.nn.LSTM` with lengths, residual sums and variational dropout.

    Parameters are named as in `torch.nn.LSTM` (``weight_ih_l0``, ``weight_hh_l0``, ``bias_ih_l0``, ``bias_hh_l0``,
    ``..._l0_reverse``), so each class loads the other's state dict, with equal results. Parameters are initialized from
    U(-1 / sqrt(hidden_size), 1 / sqrt(hidden_size)). The equations are those of `econmt_ops.lstm`.

    Args:
        input_size: I, number of input features.
        hidden_size: H, number of features of h and c.
        num_layers: L, number of stacked layers. An upper layer reads the outputs of the layer below, those of both
            directions if bidirectional.
        bias: If False, the layers have no biases.
        batch_first: Only True is supported; the argument exists for compatibility with `torch.nn.LSTM`.
        dropout: Dropout probability of the inputs of the upper layers during training.
        bidirectional: If True, each layer runs in both directions.
        residual: If True, each upper layer adds its input to its output.
        variational: If True, one dropout mask per row and layer serves all time steps (Gal and Ghahramani 2016).
        implementation: "auto" or the name of an implementation of `econmt_ops.lstm`.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If batch_first is False.
    """

    cell = LSTM_CELL
    names: ClassVar[dict[str, str]] = {"input": "weight_ih", "hidden": "weight_hh", "bias": "bias_ih"}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        residual: bool = False,
        variational: bool = False,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not batch_first:
            raise ValueError("LSTM: batch_first must be True; inputs have the shape (B, T, I)")
        self.bias = bias  # before all else, because the names of the parameters depend on it
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            dropout=dropout,
            bidirectional=bidirectional,
            residual=residual,
            variational=variational,
            implementation=implementation,
            device=device,
            dtype=dtype,
        )
        self.flatten_parameters()

    @property
    def op(self) -> Any:
        """Operation that runs the layers."""
        return lstm

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        shapes = super()._parameter_shapes(width)
        bias = shapes.pop("bias_ih")
        return shapes | {"bias_ih": bias, "bias_hh": bias} if self.bias else shapes

    def flatten_parameters(self) -> None:
        """Moves float32 parameters on a GPU into one buffer, as `torch.nn.LSTM` does: cuDNN reads it in place."""
        if self.bias and not self.bidirectional:
            move_together(in_order([self._weights(layer) for layer in range(self.num_layers)]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LSTM:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.flatten_parameters()
        return self

    def layer_weights(self, layer: int, reverse: bool = False) -> LSTMWeights:
        """Returns the weights of one layer in one direction for `econmt_ops.lstm`; the two biases are summed."""
        suffix = self._suffixes(layer)[int(reverse)]
        weight_ih: Tensor = getattr(self, "weight_ih" + suffix)
        weight_hh: Tensor = getattr(self, "weight_hh" + suffix)
        if not self.bias:
            return LSTMWeights(weight_ih, weight_hh, weight_hh.new_zeros(weight_hh.shape[0]))
        return LSTMWeights(
            weight_ih, weight_hh, getattr(self, "bias_ih" + suffix) + getattr(self, "bias_hh" + suffix)
        )

    def forward(  # type: ignore[override]  # the state is that of torch.nn.LSTM
        self,
        inputs: Tensor,
        state: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
        dropout_seed: int | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs the stack over a batch of sequences.

        Args:
            inputs: Inputs, (B, T, I).
            state: Initial (h, c), each (D L, B, H) with D directions, ordered as in `torch.nn.LSTM`; None for zeros.
            lengths: Lengths of the rows, (B,) int64; None if every row has T steps.
            dropout_seed: Seed of the dropout masks; None to draw one from torch's global generator.

        Returns:
            Outputs (B, T, D H), zero at and after a row's length, and the (h, c) after each row's last step, each
            (D L, B, H).
        """
        pairs = None
        if state is not None:
            self._check_state(*state)
            pairs = tuple(zip(*state, strict=True))
        options = self._options(lengths, dropout_seed)
        if not self.bidirectional:
            layers = tuple([self._weights(layer) for layer in range(self.num_layers)])
            planned = run_again(inputs, layers, state, options, self.implementation)
            if planned is not None:
                return planned
        outputs, last = self._run(inputs, pairs, options)
        return outputs, (torch.stack([h for h, _ in last]), torch.stack([c for _, c in last]))

    def _run_both_ways(
        self, layer: int, read: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        if state is not None:
            return super()._run_both_ways(layer, read, state, lengths)
        weights: Any = self._weights(layer), self._weights(layer, reverse=True)
        return bidirectional_lstm(read, *weights, lengths=lengths, implementation=self.implementation)

    def _weights(self, layer: int, reverse: bool = False) -> LSTMWeights | SplitLSTMWeights:
        """Returns the weights of one layer in one direction, with both biases if there are any."""
        return split_weights(self._parameters, layer, reverse) or self.layer_weights(layer, reverse)

    def _check_state(self, h: Tensor, c: Tensor) -> None:
        count = self.num_layers * (2 if self.bidirectional else 1)
        for name, tensor in (("h", h), ("c", c)):
            if tensor.dim() != 3 or tensor.shape[0] != count:
                raise ValueError(
                    f"LSTM: state {name} must be ({count}, B, {self.hidden_size}), got {tuple(tensor.shape)}"
                )


class AdditiveAttention(nn.Module):
    """Additive attention with linear projections of query and keys (Bahdanau, Cho and Bengio 2015).

    The parameters are ``query.weight``, ``key.weight``, ``key.bias``, ``score`` and, with layer normalization,
    ``layer_norm.weight`` and ``layer_norm.bias``. The equations are those of `econmt_ops.additive_attention`.

    Args:
        query_size: Number of features of a query before its projection.
        key_size: Number of features of a key before its projection.
        attention_size: A, number of features of the projections.
        layer_norm: If True, query + keys is normalized before tanh.
        implementation: "auto" or the name of an implementation of `econmt_ops.additive_attention`.
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        attention_size: int,
        *,
        layer_norm: bool = False,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        self.query = nn.Linear(query_size, attention_size, bias=False)
        self.key = nn.Linear(key_size, attention_size)
        self.score = nn.Parameter(torch.empty(attention_size))
        self.layer_norm = nn.LayerNorm(attention_size) if layer_norm else None
        self.implementation = implementation
        nn.init.uniform_(self.score, -1.0 / math.sqrt(attention_size), 1.0 / math.sqrt(attention_size))

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor | None = None, *, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes the attention of every query over all keys.

        Args:
            query: Queries, (B, T, query_size).
            keys: Keys, (B, S, key_size).
            values: Values, (B, S, E); None to use the keys.
            lengths: Numbers of valid keys, (B,) int64; None if every row has S keys.

        Returns:
            Contexts (B, T, E) and attention weights (B, T, S).
        """
        return additive_attention(
            self.query(query),
            self.key(keys),
            keys if values is None else values,
            self.score,
            lengths=lengths,
            layer_norm=_gain_and_bias(self.layer_norm),
            implementation=self.implementation,
        )


class AttentionalLSTM(nn.Module):
    """Decoder of stacked LSTM layers with attention and optional input feeding (Luong, Pham and Manning 2015).

    The parameters are those of ``lstm`` (an `LSTM`), ``query.weight``, ``key.weight``, ``combine.weight`` and
    ``combine.bias``; additive attention adds ``key.bias``, ``score`` and, with layer normalization,
    ``layer_norm.weight`` and ``layer_norm.bias``. The equations are those of `econmt_ops.attentional_lstm`.

    Args:
        input_size: I, number of input features.
        hidden_size: H, number of features of the LSTM layers and of the outputs.
        memory_size: E, number of features of the memory that is attended to.
        attention_size: A, number of features of the projected queries and keys.
        num_layers: L, number of stacked layers.
        attention: Score of a query and a key: "additive", or "dot" for their inner product.
        scale: Factor of the scores of dot attention.
        input_feeding: If True, the bottom layer also reads the output of the step before.
        residual: If True, each upper layer adds its input to its output.
        dropout: Dropout probability of the inputs of the upper layers during training.
        variational: If True, one dropout mask per row and layer serves all time steps (Gal and Ghahramani 2016).
        layer_norm: If True, query + keys is normalized before tanh.
        implementation: "auto" or the name of an implementation of `econmt_ops.attentional_lstm`.

    Raises:
        ValueError: If the attention is unknown.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        memory_size: int,
        attention_size: int,
        num_layers: int = 1,
        *,
        attention: str = "additive",
        scale: float = 1.0,
        input_feeding: bool = True,
        residual: bool = False,
        dropout: float = 0.0,
        variational: bool = False,
        layer_norm: bool = False,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        if attention not in ("additive", "dot"):
            raise ValueError(f"AttentionalLSTM: unknown attention {attention!r}; available: additive, dot")
        additive = attention == "additive"
        self.lstm = LSTM(input_size + hidden_size if input_feeding else input_size, hidden_size, num_layers)
        self.query = nn.Linear(hidden_size, attention_size, bias=False)
        self.key = nn.Linear(memory_size, attention_size, bias=additive)
        self.score = nn.Parameter(torch.empty(attention_size)) if additive else None
        self.layer_norm = nn.LayerNorm(attention_size) if layer_norm else None
        self.combine = nn.Linear(hidden_size + memory_size, hidden_size)
        self.scale = scale
        self.input_feeding = input_feeding
        self.residual = residual
        self.dropout = dropout
        self.variational = variational
        self.implementation = implementation
        if self.score is not None:
            nn.init.uniform_(self.score, -1.0 / math.sqrt(attention_size), 1.0 / math.sqrt(attention_size))

    def weights(self) -> AttentionalLSTMWeights:
        """Returns the weights in the form that `econmt_ops.attentional_lstm` takes."""
        layers = tuple(self.lstm.layer_weights(layer) for layer in range(self.lstm.num_layers))
        return AttentionalLSTMWeights(
            layers, self.query.weight, self.score, self.combine.weight, self.combine.bias
        )

    def forward(
        self,
        inputs: Tensor,
        memory: Tensor,
        state: AttentionalLSTMState | None = None,
        *,
        lengths: Tensor | None = None,
        keys: Tensor | None = None,
        dropout_seed: int | None = None,
    ) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
        """Runs the decoder over all time steps.

        Args:
            inputs: Inputs, (B, T, I).
            memory: Values that are attended to, (B, S, E).
            state: State returned by an earlier call; None for zeros.
            lengths: Numbers of valid memory positions, (B,) int64; None if every row has S positions.
            keys: ``self.key(memory)``, (B, S, A), for callers that run many single steps; None to compute it.
            dropout_seed: Seed of the dropout masks; None to draw one from torch's global generator.

        Returns:
            Outputs (B, T, H), attention weights (B, T, S) and the state after the last step.
        """
        dropout, seed = seed_of(self, self.dropout, dropout_seed)
        return attentional_lstm(
            inputs,
            self.key(memory) if keys is None else keys,
            memory,
            self.weights(),
            lengths=lengths,
            state=state,
            input_feeding=self.input_feeding,
            residual=self.residual,
            dropout=dropout,
            dropout_seed=seed,
            variational=self.variational,
            layer_norm=_gain_and_bias(self.layer_norm),
            scale=self.scale,
            implementation=self.implementation,
        )


class LinearCrossEntropy(nn.Module):
    """`torch.nn.Linear` followed by `torch.nn.CrossEntropyLoss`, without storing all logits.

    The parameters are those of `torch.nn.Linear`, initialized from U(-1 / sqrt(in_features), 1 / sqrt(in_features)).

    Args:
        in_features: H, number of input features.
        out_features: V, number of classes.
        bias: If False, the layer has no bias.
        label_smoothing: Label smoothing in [0, 1]; see `econmt_ops.linear_cross_entropy`.
        ignore_index: Target of positions that do not count.
        reduction: "mean", "sum" or "none".
        implementation: "auto" or the name of an implementation of `econmt_ops.linear_cross_entropy`.
        device: Device of the parameters.
        dtype: Type of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.implementation = implementation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all parameters again."""
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (..., V) of hidden (..., H)."""
        return functional.linear(hidden, self.weight, self.bias)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Computes the loss.

        Args:
            hidden: Hidden states, (..., H).
            targets: Class of each hidden state, (...) int64.

        Returns:
            A scalar; with the reduction "none" a tensor of the shape of `targets`.

        Raises:
            ValueError: If the leading sizes of `hidden` differ from the shape of `targets`.
        """
        if hidden.shape[:-1] != targets.shape:
            raise ValueError(
                "LinearCrossEntropy: hidden must be (..., H) with targets (...), "
                f"got {tuple(hidden.shape)} and {tuple(targets.shape)}"
            )
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.weight,
            targets.reshape(-1),
            bias=self.bias,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            implementation=self.implementation,
        )
        return loss.view(targets.shape) if self.reduction == "none" else loss


def _gain_and_bias(layer_norm: nn.LayerNorm | None) -> tuple[Tensor, Tensor] | None:
    return None if layer_norm is None else (layer_norm.weight, layer_norm.bias)
